//! Plans and events of small cases, as transcripts.

mod blocks;
mod endings;
mod planning;
mod transcript;

use crate::NewSequence;

fn sequence(id: u64, prompt: Vec<u32>, max_new_tokens: usize) -> NewSequence {
    let (min_new_tokens, stop_token_ids, priority) = (0, vec![], 0);
    NewSequence { id, prompt, max_new_tokens, min_new_tokens, stop_token_ids, priority }
}
