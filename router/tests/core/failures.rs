//! Lost, hung and refusing shards.

use std::time::Duration;

use futures::StreamExt;
use trireme_router::{
    api::{Generation, Readiness},
    error::RouterError,
    shard_group::GroupError,
};

use crate::{
    fake_shard::{FakeShard, ShardSettings},
    harness::{Core, CoreSettings, finish, ids},
};

fn two_ranks() -> CoreSettings {
    CoreSettings { tp: 2, ..CoreSettings::default() }
}

async fn slow_steps(core: &Core) {
    for shard in &core.shards {
        shard.script(|script| script.step_latency = Duration::from_millis(2));
    }
}

/// A request with its first token out.
async fn running(core: &Core) -> Generation {
    let mut generation = core.generate(&[10], 4000).await.unwrap();
    generation.events.next().await;
    generation
}

async fn check_serves(core: &Core) {
    let (tokens, outcome) = finish(core.generate(&[70], 3).await.unwrap()).await;
    assert!(outcome.is_ok(), "{outcome:?}");
    assert_eq!(ids(&tokens), [71, 72, 73]);
}

fn check_lost(outcome: Result<impl std::fmt::Debug, RouterError>) {
    assert!(matches!(outcome, Err(RouterError::ShardLost)), "{outcome:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shard_that_dies_in_decode_is_replaced() {
    let mut core = Core::start(two_ranks(), None).await;
    slow_steps(&core).await;
    let lost = running(&core).await;
    core.shards[1].die();
    check_lost(finish(lost).await.1);
    core.until(|readiness| matches!(readiness, Readiness::Lost(_))).await;
    // What comes meanwhile waits for the next group.
    let waiting = core.generate(&[50], 2).await.unwrap();
    core.shards[1] = core.new_shard(1);
    let (tokens, outcome) = finish(waiting).await;
    assert!(outcome.is_ok(), "{outcome:?}");
    assert_eq!(ids(&tokens), [51, 52]);
    check_serves(&core).await;
    let epochs = core.shards[0].seen(|seen| seen.epochs.clone());
    assert!(epochs.len() >= 2 && epochs.is_sorted_by(|a, b| a < b), "{epochs:?}");
    let last = epochs.last().copied();
    assert_eq!(core.shards[1].seen(|seen| seen.epochs.last().copied()), last);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shard_that_dies_while_idle_is_noticed() {
    let mut core = Core::start(two_ranks(), None).await;
    core.shards[0].die();
    core.until(|readiness| matches!(readiness, Readiness::Lost(_))).await;
    core.shards[0] = core.new_shard(0);
    core.until(Readiness::is_ready).await;
    check_serves(&core).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hung_step_meets_its_deadline() {
    let settings = CoreSettings { step_deadline: Duration::from_millis(300), ..two_ranks() };
    let core = Core::start(settings, None).await;
    slow_steps(&core).await;
    let lost = running(&core).await;
    core.shards[1].script(|script| script.hang = true);
    check_lost(finish(lost).await.1);
    core.shards[1].script(|script| script.hang = false);
    core.until(Readiness::is_ready).await;
    check_serves(&core).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_step_loses_the_group() {
    let core = Core::start(two_ranks(), None).await;
    slow_steps(&core).await;
    let lost = running(&core).await;
    core.shards[0].script(|script| script.refuse = Some("no".to_owned()));
    check_lost(finish(lost).await.1);
    core.shards[0].script(|script| script.refuse = None);
    core.until(Readiness::is_ready).await;
    check_serves(&core).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_bad_sequence_fails_alone() {
    let core = Core::start(two_ranks(), None).await;
    slow_steps(&core).await;
    let good = core.generate(&[500], 40).await.unwrap();
    for shard in &core.shards {
        shard.script(|script| script.poison = Some(105));
    }
    let (tokens, outcome) = finish(core.generate(&[100], 40).await.unwrap()).await;
    assert!(
        matches!(&outcome, Err(RouterError::Sequence(why)) if why == "poisoned"),
        "{outcome:?}"
    );
    assert_eq!(ids(&tokens), [101, 102, 103, 104, 105]);
    assert_eq!(finish(good).await.1.unwrap().usage.completion_tokens, 40);
}

#[tokio::test(flavor = "multi_thread")]
async fn shards_of_another_split_end_the_start() {
    let mut core = Core::without_shards(two_ranks(), None);
    // Rank 0 is right, rank 1 says that it is rank 0.
    let right = core.new_shard(0);
    let wrong = ShardSettings { rank: 0, tp: 2, pp: 1, num_blocks: 8, most_batch_tokens: 128 };
    let wrong = FakeShard::start(&core.socket(1), wrong);
    core.shards = vec![right, wrong];
    let outcome = core.task.await.unwrap();
    assert!(matches!(outcome, Err(GroupError::Mismatch { rank: 1, .. })), "{outcome:?}");
}

/// Trying again until the start's deadline would only hide what is wrong.
#[tokio::test(flavor = "multi_thread")]
async fn arguments_that_a_shard_refuses_end_the_start() {
    let mut core = Core::without_shards(CoreSettings::default(), None);
    let small = ShardSettings { rank: 0, tp: 1, pp: 1, num_blocks: 512, most_batch_tokens: 100 };
    core.shards.push(FakeShard::start(&core.socket(0), small));
    let error = core.task.await.unwrap().unwrap_err().to_string();
    assert!(error.contains("rank 0 refused Warmup") && error.contains("over 100"), "{error}");
}
