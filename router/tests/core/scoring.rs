//! Scored prompts: whole in spite of chunks, neighbours, the prefix cache and preemption.

use futures::{StreamExt, future::join_all};
use trireme_router::api::{GenerateEvent, Parameters, PromptScoring, PromptToken};

use crate::harness::{Core, CoreSettings};

/// The scores of a prompt, and how many tokens followed them.
async fn scores(core: &Core, ids: &[u32], scoring: PromptScoring, new: u32) -> Vec<PromptToken> {
    let parameters = Parameters {
        max_new_tokens: Some(new),
        prompt_scoring: Some(scoring),
        ignore_eos: true,
        ..Parameters::default()
    };
    let generation = core.generate_with(ids, parameters).await.unwrap();
    let events: Vec<GenerateEvent> = generation.events.collect().await;
    let mut events = events.into_iter();
    let Some(GenerateEvent::Prompt(prompt)) = events.next() else { panic!("the prompt is first") };
    for index in 0..new {
        assert!(matches!(events.next(), Some(GenerateEvent::Token(_))), "token {index}");
    }
    let end = events.next();
    assert!(matches!(end, Some(GenerateEvent::Finished(_))), "{end:?}");
    assert!(events.next().is_none());
    prompt
}

async fn check(core: &Core, ids: &[u32], scoring: PromptScoring, new: u32) {
    let prompt = scores(core, ids, scoring, new).await;
    assert_eq!(prompt.len(), ids.len());
    for (position, (token, &id)) in prompt.iter().zip(ids).enumerate() {
        let what = format!("{position} of {} from {}", ids.len(), scoring.start);
        assert_eq!(token.id, id, "{what}");
        let is_scored = position >= (scoring.start as usize).max(1);
        let score = token.score.as_ref();
        assert_eq!(score.map(|score| score.logprob), is_scored.then_some(-(id as f32)), "{what}");
        let top = score.map_or(0, |score| score.top.len());
        assert_eq!(top, usize::from(is_scored && scoring.top_logprobs > 0), "{what}");
    }
}

fn prompt(number: u32, len: u32) -> Vec<u32> {
    // All begin alike, so that later ones find the beginning in the cache.
    (0..len).map(|at| if at < 40 { at + 3 } else { 90 * number + at + 3 }).collect()
}

async fn check_many(num_blocks: u32, (tp, pp): (u32, u32)) {
    let settings = CoreSettings { tp, pp, num_blocks, ..CoreSettings::default() };
    let core = Core::start(settings, None).await;
    let requests = (0..40_u32).map(|number| {
        let core = &core;
        async move {
            // Longer than the 128 tokens of a step, shorter than a block, and between.
            let ids = prompt(number, 1 + number * 5);
            let scoring = PromptScoring {
                top_logprobs: number % 2,
                start: [0, 1, 30, 500][number as usize % 4],
            };
            check(core, &ids, scoring, [0, 1, 40][number as usize % 3]).await;
        }
    });
    join_all(requests).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_token_is_scored_once() {
    check_many(2000, (1, 1)).await;
    check_many(2000, (2, 2)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn preemption_loses_no_score() {
    check_many(40, (1, 2)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_as_long_as_the_context_can_be_scored() {
    let core = Core::start(CoreSettings { num_blocks: 10, ..CoreSettings::default() }, None).await;
    let ids = prompt(1, 160);
    check(&core, &ids, PromptScoring::default(), 0).await;
    check(&core, &ids[..159], PromptScoring::default(), 1).await;
    let parameters = Parameters { max_new_tokens: Some(1), ..Parameters::default() };
    assert!(core.generate_with(&ids, parameters).await.is_err());
}
