//! Batching, text, cancellation, overload and drain.

use std::{fs, path::PathBuf, time::Duration};

use futures::{FutureExt, StreamExt, future::join_all};
use tokenizers::Tokenizer;
use trireme_checkpoint::TextSources;
use trireme_router::{
    api::{
        FinishReason, GenerateEvent, GenerateRequest, Generator, Parameters, Prompt, Readiness,
        StopCause,
    },
    error::RouterError,
    tokenizer::TextPipeline,
};

use crate::{
    fake_shard::VOCAB,
    harness::{Core, CoreSettings, finish, ids, wait},
};

fn smollm2() -> TextPipeline {
    let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../integration-tests/fixtures");
    let json = fs::read(fixtures.join("tokenizers/smollm2/tokenizer.json")).unwrap();
    let sources = TextSources::new(Tokenizer::from_bytes(json).unwrap(), VOCAB as usize);
    TextPipeline::new(sources, None, 1).unwrap()
}

/// 50 at once, of several lengths, over few blocks, so that some are preempted and come again.
async fn check_batching(tp: u32, pp: u32) {
    let settings = CoreSettings { tp, pp, num_blocks: 64, ..CoreSettings::default() };
    let core = Core::start(settings, None).await;
    let answers = (0..50_u32).map(|number| {
        let core = &core;
        async move {
            let prompt: Vec<u32> = (0..1 + number * 3).map(|at| 900 * number + at + 3).collect();
            let (last, wanted) = (prompt[prompt.len() - 1], 5 + number);
            let generation = core.generate(&prompt, wanted).await.unwrap();
            let (tokens, outcome) = finish(generation).await;
            let expect: Vec<u32> = (1..=wanted).map(|step| (last + step) % VOCAB).collect();
            assert_eq!(ids(&tokens), expect, "request {number}");
            let finished = outcome.unwrap();
            assert_eq!(finished.reason, FinishReason::Length);
            assert_eq!(finished.usage.prompt_tokens, prompt.len() as u32);
            assert_eq!(finished.usage.completion_tokens, wanted);
        }
    });
    join_all(answers).await;
    let one_by_one: u32 = (0..50).map(|number| 5 + number).sum();
    for shard in &core.shards {
        let (steps, most) = shard.seen(|seen| (seen.steps, seen.most_decodes));
        assert!(steps < u64::from(one_by_one) / 2, "{steps} steps");
        assert!(most > 4, "at most {most} decodes in a step");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_requests_share_steps() {
    check_batching(1, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_requests_share_steps_over_four_ranks() {
    check_batching(2, 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_end_at_stop_ids_and_strings() {
    let core = Core::start(CoreSettings::default(), Some(smollm2())).await;
    let decode = |ids: Vec<u32>| core.front.decode(ids);
    let check = async |parameters: Parameters, count: usize, text: String, stop: StopCause| {
        let (tokens, outcome) = finish(core.generate_with(&[500], parameters).await.unwrap()).await;
        let finished = outcome.unwrap();
        assert_eq!(ids(&tokens), (501..501 + count as u32).collect::<Vec<_>>());
        assert_eq!(finished.text, text);
        assert_eq!(finished.stop, Some(stop));
        assert_eq!(finished.reason, FinishReason::Stop);
        let pieces: String = tokens.iter().map(|token| token.text.as_str()).collect();
        assert_eq!(pieces + &finished.rest, finished.text);
    };
    let text = |last: u32| decode((501..=last).collect());
    let by_id = Parameters { stop_token_ids: vec![505], ..Parameters::default() };
    check(by_id.clone(), 5, text(504).await.unwrap(), StopCause::TokenId(505)).await;
    let included = Parameters { include_stop: true, ..by_id };
    check(included, 5, text(505).await.unwrap(), StopCause::TokenId(505)).await;

    // From inside token 503 into token 504.
    let (before, whole) = (text(503).await.unwrap(), text(504).await.unwrap());
    let cut = before.char_indices().next_back().unwrap().0;
    let next = whole[before.len()..].chars().next().unwrap();
    let stop = whole[cut..before.len() + next.len_utf8()].to_owned();
    let by_text = Parameters { stop: vec![stop.clone()], ..Parameters::default() };
    let cut = whole.find(&stop).unwrap();
    check(by_text, 4, whole[..cut].to_owned(), StopCause::Text(stop)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_sequence_ends_an_answer_unless_ignored() {
    let core = Core::start(CoreSettings::default(), None).await;
    for (ignore_eos, least, count) in [(false, 0, 1), (true, 0, 4), (false, 2, 4)] {
        let parameters = Parameters {
            ignore_eos,
            min_new_tokens: least,
            max_new_tokens: Some(4),
            ..Parameters::default()
        };
        let (tokens, outcome) = finish(core.generate_with(&[1], parameters).await.unwrap()).await;
        assert_eq!(tokens.len(), count, "ignore_eos {ignore_eos}, at least {least}");
        assert_eq!(tokens[0].id, 2, "the ending token is reported");
        assert_eq!(outcome.unwrap().stop.is_some(), count == 1);
    }
    // As a stop id of the client's own, it is told as such.
    let own = Parameters { ignore_eos: true, stop_token_ids: vec![2], ..Parameters::default() };
    let (_, outcome) = finish(core.generate_with(&[1], own).await.unwrap()).await;
    assert_eq!(outcome.unwrap().stop, Some(StopCause::TokenId(2)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_answer_leaves_the_shards() {
    let settings = CoreSettings { max_sequences: 2, ..CoreSettings::default() };
    let core = Core::start(settings, None).await;
    core.shards[0].script(|script| script.step_latency = Duration::from_millis(2));
    let mut dropped = core.generate(&[10], 2000).await.unwrap();
    let kept = core.generate(&[20], 60).await.unwrap();
    let queued = core.generate(&[30], 2000).await.unwrap();
    assert!(matches!(dropped.events.next().await, Some(GenerateEvent::Token(_))));
    drop(queued);
    drop(dropped);
    let (tokens, outcome) = finish(kept).await;
    assert!(outcome.is_ok());
    assert_eq!(tokens.len(), 60);
    // One more request makes a step that carries what is to be forgotten.
    let (tokens, _) = finish(core.generate(&[40], 3).await.unwrap()).await;
    assert_eq!(ids(&tokens), [41, 42, 43]);
    core.shards[0].seen(|seen| {
        assert!(seen.dropped.contains(&1), "{:?}", seen.dropped);
        assert!(!seen.admitted.contains(&3), "a queued request that left never runs");
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_refuses() {
    let settings = CoreSettings { max_sequences: 1, max_waiting: 4, ..CoreSettings::default() };
    let core = Core::start(settings, None).await;
    core.shards[0].script(|script| script.step_latency = Duration::from_millis(5));
    let mut admitted = Vec::new();
    let mut refused = 0;
    for number in 0..20 {
        match core.generate(&[100 + number], 10).await {
            Ok(generation) => admitted.push(generation),
            Err(RouterError::Overloaded { limit, retry_after_s }) => {
                assert_eq!(limit, 4);
                assert!(retry_after_s > 0);
                refused += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert!(refused > 0);
    assert!(admitted.len() >= 4);
    for generation in admitted {
        assert_eq!(finish(generation).await.1.unwrap().usage.completion_tokens, 10);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_reader_harms_only_itself() {
    let settings = CoreSettings { lag_tokens: 32, ..CoreSettings::default() };
    let core = Core::start(settings, None).await;
    let slow = core.generate(&[10], 1000).await.unwrap();
    let (tokens, outcome) = finish(core.generate(&[2000], 300).await.unwrap()).await;
    assert!(outcome.is_ok());
    assert_eq!(tokens.len(), 300);
    let (tokens, outcome) = finish(slow).await;
    assert!(matches!(outcome, Err(RouterError::SlowReader { limit: 32 })), "{outcome:?}");
    assert_eq!(ids(&tokens), (11..43).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_finishes_what_runs() {
    let core = Core::start(CoreSettings::default(), None).await;
    core.shards[0].script(|script| script.step_latency = Duration::from_millis(2));
    let mut running = core.generate(&[10], 50).await.unwrap();
    running.events.next().await;
    core.shutdown.cancel();
    core.until(|readiness| *readiness == Readiness::Draining).await;
    let refusal = core.generate(&[20], 5).await.err();
    assert!(matches!(refusal, Some(RouterError::ShuttingDown)), "{refusal:?}");
    let (tokens, outcome) = finish(running).await;
    assert_eq!(outcome.unwrap().reason, FinishReason::Length);
    assert_eq!(tokens.len(), 49);
    core.task.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_has_a_deadline() {
    let settings =
        CoreSettings { drain_deadline: Duration::from_millis(50), ..CoreSettings::default() };
    let core = Core::start(settings, None).await;
    core.shards[0].script(|script| script.step_latency = Duration::from_millis(50));
    let running = core.generate(&[10], 4000).await.unwrap();
    core.shutdown.cancel();
    let (_, outcome) = finish(running).await;
    assert!(matches!(outcome, Err(RouterError::ShuttingDown)), "{outcome:?}");
    core.task.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_before_the_first_group_are_refused() {
    let mut core = Core::without_shards(CoreSettings::default(), None);
    let refusal = core.generate(&[1], 5).await.err();
    assert!(matches!(refusal, Some(RouterError::NotReady(_))), "{refusal:?}");
    let shard = core.new_shard(0);
    core.shards.push(shard);
    core.until(Readiness::is_ready).await;
    wait("an epoch", || core.shards[0].seen(|seen| seen.epochs == [1])).await;
    assert_eq!(core.front.model().max_model_len, 4096);
}

/// Else a stream would have an event more now and then, depending on who runs first.
#[tokio::test(flavor = "multi_thread")]
async fn the_end_is_there_with_the_last_token() {
    let core = Core::start(CoreSettings::default(), Some(smollm2())).await;
    let by_id = Parameters { stop_token_ids: vec![503], ..Parameters::default() };
    let by_text = Parameters {
        stop: vec![core.front.decode(vec![503]).await.unwrap()],
        ..Parameters::default()
    };
    let by_length = Parameters { max_new_tokens: Some(3), ..Parameters::default() };
    for parameters in [by_id, by_text, by_length] {
        for round in 0..100 {
            let mut events = core.generate_with(&[500], parameters.clone()).await.unwrap().events;
            for token in 1..=3 {
                let event = events.next().await;
                assert!(matches!(event, Some(GenerateEvent::Token(_))), "{token}: {event:?}");
            }
            let end = events.next().now_or_never().flatten();
            assert!(matches!(end, Some(GenerateEvent::Finished(_))), "{round}: {end:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reset_forgets_cached_prefixes() {
    let mut core = Core::without_shards(CoreSettings::default(), None);
    let early = core.front.reset_prefix_cache().await;
    assert!(matches!(early, Err(RouterError::NotReady(_))), "{early:?}");
    let shard = core.new_shard(0);
    core.shards.push(shard);
    core.until(Readiness::is_ready).await;
    let prompt: Vec<u32> = (100..200).collect();
    let cached = async || {
        let (_, outcome) = finish(core.generate(&prompt, 2).await.unwrap()).await;
        outcome.unwrap().usage.cached_tokens
    };
    assert_eq!(cached().await, 0);
    assert_eq!(cached().await, 96);
    core.front.reset_prefix_cache().await.unwrap();
    assert_eq!(cached().await, 0);
    assert_eq!(cached().await, 96);
}

/// The queue has room for one: a request that was admitted for nobody must not keep it.
#[tokio::test(flavor = "multi_thread")]
async fn a_caller_who_leaves_before_the_answer_cancels_it() {
    let settings = CoreSettings { max_sequences: 1, max_waiting: 1, ..CoreSettings::default() };
    let core = Core::start(settings, None).await;
    core.shards[0].script(|script| script.hang = true);
    let running = core.generate(&[10], 3).await.unwrap();
    for number in 0..200 {
        let prompt = [100 + number];
        let mut asking = Box::pin(core.generate(&prompt, 3));
        // When the loop admits it, nobody reads that it did.
        let _ = (&mut asking).now_or_never();
        tokio::task::yield_now().await;
    }
    let admitted = async {
        loop {
            match core.generate(&[500], 3).await {
                Ok(generation) => return generation,
                Err(RouterError::Overloaded { .. }) => tokio::task::yield_now().await,
                Err(error) => panic!("{error}"),
            }
        }
    };
    let admitted = tokio::time::timeout(Duration::from_secs(20), admitted).await.unwrap();
    core.shards[0].script(|script| script.hang = false);
    assert_eq!(ids(&finish(running).await.0), [11, 12, 13]);
    assert_eq!(ids(&finish(admitted).await.0), [501, 502, 503]);
}

/// A long text is refused unread only when it cannot fit, or be cut until it fits.
#[tokio::test(flavor = "multi_thread")]
async fn long_texts_are_judged_by_what_they_become() {
    let core = Core::start(CoreSettings::default(), Some(smollm2())).await;
    let check = async |text: String, truncate: Option<u32>, tokens: Option<usize>| {
        let chars = text.chars().count();
        let parameters = Parameters { truncate, max_new_tokens: Some(1), ..Parameters::default() };
        let prompt = Prompt::Text(text);
        let request = GenerateRequest { request_id: "r".to_owned(), prompt, parameters };
        match (core.front.generate(request).await, tokens) {
            (Ok(generation), Some(tokens)) => {
                assert!(generation.prompt_ids.len() <= tokens, "{chars}, {truncate:?}");
            }
            (Err(RouterError::Invalid { field: "prompt", .. }), None) => {}
            (outcome, _) => panic!("{chars}, {truncate:?}: {:?}", outcome.err()),
        }
    };
    // Runs of spaces are single tokens.
    check(" ".repeat(140_000), None, Some(4095)).await;
    let longest = smollm2().token_chars();
    let over = |times: usize| "ab ".repeat(times * longest * 4096 / 3 + 1);
    check(over(1), None, None).await;
    check(over(1), Some(10), Some(10)).await;
    check(over(4), Some(10), None).await;
}
