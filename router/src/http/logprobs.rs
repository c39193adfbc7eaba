//! The two shapes of logprobs: parallel arrays on `/v1/completions`, a list of entries on chat.

use schemars::JsonSchema;
use serde::{Serialize, Serializer};

use crate::api::{PromptScore, PromptToken, Token, TopToken};

/// What stands for a logprob that JSON cannot hold, as in vLLM.
const LOGPROB_MIN: f32 = -9999.0;

/// How a token is called.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Naming {
    /// By its piece of text.
    #[default]
    Piece,
    /// `token_id:N`, which tells all tokens apart.
    Id,
}

impl Naming {
    fn name(self, id: u32, piece: &str) -> String {
        match self {
            Self::Piece => piece.to_owned(),
            Self::Id => format!("token_id:{id}"),
        }
    }
}

/// Parallel arrays, one entry for each token.
#[derive(Debug, Default, Serialize, JsonSchema)]
pub struct CompletionLogprobs {
    /// Where each token's text begins, in characters of the choice's text.
    text_offset: Vec<usize>,
    token_logprobs: Vec<Option<f32>>,
    tokens: Vec<String>,
    #[schemars(with = "Vec<Option<std::collections::BTreeMap<String, f32>>>")]
    top_logprobs: Vec<Option<Candidates>>,
}

impl CompletionLogprobs {
    /// Of tokens whose text begins `offset_chars` into the choice's text.
    pub fn new(tokens: &[Token], offset_chars: usize, naming: Naming) -> Self {
        let mut logprobs = Self::default();
        logprobs.answer(tokens, offset_chars, naming);
        logprobs
    }

    /// Of a prompt that is repeated, with `top` candidates a token, then of the answer's tokens. A
    /// prompt token without a score has null in both arrays.
    pub fn echoed(
        prompt: &[PromptToken],
        top: usize,
        tokens: &[Token],
        echo_chars: usize,
        naming: Naming,
    ) -> Self {
        let mut logprobs = Self::default();
        let mut offset_chars = 0;
        for token in prompt {
            let score = token.score.as_ref();
            logprobs.text_offset.push(offset_chars);
            logprobs.token_logprobs.push(score.map(|score| writable(score.logprob)));
            logprobs.tokens.push(naming.name(token.id, &token.piece));
            let candidates = score.map(|score| Candidates::of(token, score, top, naming));
            logprobs.top_logprobs.push(candidates);
            offset_chars += token.text.chars().count();
        }
        logprobs.answer(tokens, echo_chars, naming);
        logprobs
    }

    fn answer(&mut self, tokens: &[Token], mut offset_chars: usize, naming: Naming) {
        for token in tokens {
            self.text_offset.push(offset_chars);
            self.token_logprobs.push(token.logprob.map(writable));
            self.tokens.push(naming.name(token.id, &token.piece));
            self.top_logprobs.push(Some(Candidates::new(token, naming)));
            offset_chars += token.text.chars().count();
        }
    }
}

/// A map from pieces to logprobs, best first, the chosen token included. Serialized from the same
/// `f32` as `token_logprobs`: clients compare the two for equality.
#[derive(Debug, Default)]
struct Candidates(Vec<(String, f32)>);

impl Candidates {
    fn new(token: &Token, naming: Naming) -> Self {
        let mut candidates = Self::default();
        for TopToken { id, piece, logprob, .. } in &token.top {
            candidates.insert(*id, naming.name(*id, piece), *logprob);
        }
        if let Some(logprob) = token.logprob
            && token.top.iter().all(|top| top.id != token.id)
        {
            candidates.insert(token.id, naming.name(token.id, &token.piece), logprob);
        }
        candidates
    }

    fn of(token: &PromptToken, score: &PromptScore, top: usize, naming: Naming) -> Self {
        let mut candidates = Self::default();
        for TopToken { id, piece, logprob, .. } in score.top.iter().take(top) {
            candidates.insert(*id, naming.name(*id, piece), *logprob);
        }
        if score.top.iter().take(top).all(|top| top.id != token.id) {
            candidates.insert(token.id, naming.name(token.id, &token.piece), score.logprob);
        }
        candidates
    }

    /// Distinct ids can have one piece (an incomplete character); the later one is named by its id.
    fn insert(&mut self, id: u32, name: String, logprob: f32) {
        let taken = self.0.iter().any(|(known, _)| *known == name);
        let key = if taken { Naming::Id.name(id, "") } else { name };
        self.0.push((key, writable(logprob)));
    }
}

impl Serialize for Candidates {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(piece, logprob)| (piece, logprob)))
    }
}

/// vLLM's `prompt_logprobs`: for each prompt token null, or a map from ids to candidates, the
/// prompt's own token first.
#[derive(Debug, JsonSchema)]
#[schemars(transparent)]
pub struct PromptLogprobs(
    #[schemars(with = "Vec<Option<std::collections::BTreeMap<String, PromptCandidate>>>")]
    Vec<Option<Vec<(u32, PromptCandidate)>>>,
);

#[derive(Debug, Serialize, JsonSchema)]
struct PromptCandidate {
    logprob: f32,
    rank: u32,
    decoded_token: String,
}

impl PromptLogprobs {
    /// With `top` candidates a token, and its own where it is not among them.
    pub fn new(prompt: &[PromptToken], top: usize) -> Self {
        let candidates = |token: &PromptToken| {
            let score = token.score.as_ref()?;
            let own = PromptCandidate {
                logprob: writable(score.logprob),
                rank: score.rank,
                decoded_token: token.piece.clone(),
            };
            let candidate = |(rank, top): (u32, &TopToken)| {
                let decoded_token = top.piece.clone();
                (top.id, PromptCandidate { logprob: writable(top.logprob), rank, decoded_token })
            };
            let others = (1..).zip(&score.top).take(top).filter(|(_, top)| top.id != token.id);
            Some(std::iter::once((token.id, own)).chain(others.map(candidate)).collect())
        };
        Self(prompt.iter().map(candidates).collect())
    }
}

impl Serialize for PromptLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        struct Map<'a>(&'a [(u32, PromptCandidate)]);
        impl Serialize for Map<'_> {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_map(self.0.iter().map(|(id, candidate)| (id, candidate)))
            }
        }
        serializer.collect_seq(self.0.iter().map(|entry| entry.as_deref().map(Map)))
    }
}

/// A chat choice's logprobs.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ChatLogprobs {
    content: Vec<Entry>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Entry {
    #[serde(flatten)]
    token: Candidate,
    top_logprobs: Vec<Candidate>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Candidate {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl ChatLogprobs {
    pub fn new(tokens: &[Token], naming: Naming) -> Self {
        let content = tokens
            .iter()
            .map(|token| Entry {
                token: Candidate {
                    token: naming.name(token.id, &token.piece),
                    logprob: token.logprob.map_or(LOGPROB_MIN, writable),
                    bytes: token.bytes.clone(),
                },
                top_logprobs: token.top.iter().map(|top| candidate(top, naming)).collect(),
            })
            .collect();
        Self { content }
    }
}

fn candidate(top: &TopToken, naming: Naming) -> Candidate {
    Candidate {
        token: naming.name(top.id, &top.piece),
        logprob: writable(top.logprob),
        bytes: top.bytes.clone(),
    }
}

/// A finite number, so that the JSON is valid.
pub fn writable(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob.max(LOGPROB_MIN) } else { LOGPROB_MIN }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn top(id: u32, piece: &str, logprob: f32) -> TopToken {
        TopToken { id, piece: piece.into(), bytes: piece.as_bytes().to_vec(), logprob }
    }

    fn token(id: u32, text: &str, logprob: f32, top: Vec<TopToken>) -> Token {
        Token {
            id,
            text: text.into(),
            piece: text.into(),
            bytes: text.as_bytes().to_vec(),
            special: false,
            logprob: Some(logprob),
            top,
        }
    }

    /// Both shapes as a client reads them; compared as text, since that is what must be equal.
    fn check(tokens: &[Token], completion: Value, chat: Value) {
        let written =
            serde_json::to_string(&CompletionLogprobs::new(tokens, 5, Naming::Piece)).unwrap();
        assert_eq!(written, completion.to_string());
        let written = serde_json::to_string(&ChatLogprobs::new(tokens, Naming::Piece)).unwrap();
        assert_eq!(written, chat.to_string());
    }

    #[test]
    fn both_shapes_hold_the_same_numbers() {
        let tokens = [
            token(1, "né", -0.1, vec![top(1, "né", -0.1), top(2, "b", -2.5)]),
            token(9, "z", -3.0, vec![top(1, "né", -0.25)]),
        ];
        check(
            &tokens,
            json!({
                "text_offset": [5, 7],
                "token_logprobs": [-0.1, -3.0],
                "tokens": ["né", "z"],
                "top_logprobs": [{"né": -0.1, "b": -2.5}, {"né": -0.25, "z": -3.0}],
            }),
            json!({"content": [
                {"token": "né", "logprob": -0.1, "bytes": [110, 195, 169], "top_logprobs": [
                    {"token": "né", "logprob": -0.1, "bytes": [110, 195, 169]},
                    {"token": "b", "logprob": -2.5, "bytes": [98]},
                ]},
                {"token": "z", "logprob": -3.0, "bytes": [122], "top_logprobs": [
                    {"token": "né", "logprob": -0.25, "bytes": [110, 195, 169]},
                ]},
            ]}),
        );
    }

    #[test]
    fn pieces_that_look_alike_keep_apart_and_infinities_are_written() {
        let tokens = [token(
            7,
            "\u{fffd}",
            f32::NEG_INFINITY,
            vec![top(4, "\u{fffd}", -0.5), top(5, "\u{fffd}", -0.75)],
        )];
        let written =
            serde_json::to_value(CompletionLogprobs::new(&tokens, 0, Naming::Piece)).unwrap();
        assert_eq!(
            written["top_logprobs"],
            json!([{"\u{fffd}": -0.5, "token_id:5": -0.75, "token_id:7": -9999.0}])
        );
        assert_eq!(written["token_logprobs"], json!([-9999.0]));
        let written =
            serde_json::to_value(CompletionLogprobs::new(&tokens, 0, Naming::Id)).unwrap();
        assert_eq!(written["tokens"], json!(["token_id:7"]));
        let top = json!([{"token_id:4": -0.5, "token_id:5": -0.75, "token_id:7": -9999.0}]);
        assert_eq!(written["top_logprobs"], top);
    }
}
