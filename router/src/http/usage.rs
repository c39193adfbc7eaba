//! Token counts as both OpenAI routes tell them, counted in ids.

use schemars::JsonSchema;
use serde::Serialize;

use super::turns::Answer;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct UsageBody {
    pub prompt_tokens: u64,
    pub total_tokens: u64,
    pub completion_tokens: u64,
    pub prompt_tokens_details: PromptDetails,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct PromptDetails {
    /// Prompt tokens that came from the prefix cache.
    pub cached_tokens: u64,
}

/// One choice's counts so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub cached_tokens: u32,
}

impl Counts {
    pub fn of(prompt: &[u32], answer: &Answer) -> Self {
        Self {
            prompt_tokens: prompt.len(),
            completion_tokens: answer.tokens.len(),
            cached_tokens: answer.finished.usage.cached_tokens,
        }
    }
}

impl UsageBody {
    /// Sums choices that come in groups of `n` for each prompt: a prompt counts once.
    pub fn total(choices: impl IntoIterator<Item = Counts>, n: u32) -> Self {
        let mut usage = Self::default();
        for (index, counts) in choices.into_iter().enumerate() {
            if index % n.max(1) as usize == 0 {
                usage.prompt_tokens += counts.prompt_tokens as u64;
                usage.prompt_tokens_details.cached_tokens += u64::from(counts.cached_tokens);
            }
            usage.completion_tokens += counts.completion_tokens as u64;
        }
        usage.total_tokens = usage.prompt_tokens + usage.completion_tokens;
        usage
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_counts_once_for_all_its_choices() {
        let counts = |prompt_tokens, completion_tokens, cached_tokens| Counts {
            prompt_tokens,
            completion_tokens,
            cached_tokens,
        };
        let choices = [counts(10, 3, 0), counts(10, 4, 8), counts(7, 5, 4), counts(7, 6, 4)];
        let usage = UsageBody::total(choices, 2);
        assert_eq!(
            usage,
            UsageBody {
                prompt_tokens: 17,
                completion_tokens: 18,
                total_tokens: 35,
                prompt_tokens_details: PromptDetails { cached_tokens: 4 },
            }
        );
    }
}
