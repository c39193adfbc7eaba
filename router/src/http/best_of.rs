//! The best of several answers to one prompt: those whose tokens are likeliest on average, as in
//! OpenAI's `best_of` and TGI's.

use super::turns::Answer;

/// Orders each group of `candidates` answers, best first; the groups stay where they are. Of
/// equals the earlier one comes first, whose seed is nearest to the request's own.
pub fn best_first(answers: &mut [Answer], candidates: usize) {
    for group in answers.chunks_mut(candidates.max(1)) {
        group.sort_by(|a, b| mean_logprob(b).total_cmp(&mean_logprob(a)));
    }
}

/// Of an answer whose tokens have logprobs.
fn mean_logprob(answer: &Answer) -> f64 {
    let sum: f64 = answer.tokens.iter().map(|token| f64::from(token.logprob.unwrap_or(0.0))).sum();
    sum / answer.tokens.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{FinishReason, Finished, Token, Usage};

    fn answer(text: &str, logprobs: &[f32]) -> Answer {
        let token = |logprob: &f32| Token {
            id: 0,
            text: String::new(),
            piece: String::new(),
            bytes: Vec::new(),
            special: false,
            logprob: Some(*logprob),
            top: Vec::new(),
        };
        let finished = Finished {
            reason: FinishReason::Stop,
            text: text.into(),
            rest: String::new(),
            stop: None,
            usage: Usage::default(),
        };
        let tokens = logprobs.iter().map(token).collect();
        Answer { prompt: None, tokens, finished, seed: 0 }
    }

    #[test]
    fn the_likeliest_by_token_come_first_of_each_prompt() {
        for (candidates, expected) in [(3, "bcafde"), (6, "fbcdea"), (1, "abcdef")] {
            let mut answers = vec![
                answer("a", &[-3.0]),
                answer("b", &[-1.0, -1.0, -1.0, -1.0]),
                answer("c", &[-2.0]),
                answer("d", &[-2.0]),
                answer("e", &[-2.0]),
                answer("f", &[-0.5, -0.5]),
            ];
            best_first(&mut answers, candidates);
            let texts: String = answers.into_iter().map(|answer| answer.finished.text).collect();
            assert_eq!(texts, expected, "of {candidates}");
        }
    }
}
