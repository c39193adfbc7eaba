//! Plans and events of small cases, as transcripts.

mod blocks;
mod endings;
mod planning;
mod transcript;

use crate::NewSequence;

fn sequence(id: u64, prompt: Vec<u32>, max_new_tokens: usize) -> NewSequence {
    NewSequence {
        id,
        prompt,
        max_new_tokens,
        min_new_tokens: 0,
        stop_token_ids: vec![],
        priority: 0,
        score_from: None,
    }
}
