//! What each token id adds to an answer.

use std::sync::Arc;

use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

/// Stands before a special token's text; no text in UTF-8 holds this byte.
const SPECIAL: u8 = TokTrie::SPECIAL_TOKEN_MARKER;

/// Bytes of every token id.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Vocabulary {
    /// A special token's text stands after a byte 0xFF; an id that no answer can hold has none.
    pub words: Vec<Vec<u8>>,
    /// Ids that end an answer.
    pub end_of_sequence: Vec<u32>,
}

impl Vocabulary {
    /// `tokens`: bytes of each id from 0, and whether it is special.
    pub fn new<'a>(
        tokens: impl IntoIterator<Item = (&'a [u8], bool)>,
        end_of_sequence: &[u32],
    ) -> Self {
        let word = |(id, (bytes, special)): (usize, (&[u8], bool))| {
            let special = special || end_of_sequence.contains(&(id as u32));
            match bytes.first() {
                None => Vec::new(),
                Some(_) if special => [&[SPECIAL], bytes].concat(),
                // A lone 0xFF is never part of a character.
                Some(&SPECIAL) => Vec::new(),
                Some(_) => bytes.to_vec(),
            }
        };
        let words: Vec<_> = tokens.into_iter().enumerate().map(word).collect();
        let known = |id: &&u32| (**id as usize) < words.len();
        let end_of_sequence = end_of_sequence.iter().filter(known).copied().collect();
        Self { words, end_of_sequence }
    }

    /// Ids with the text of each special token.
    pub fn special(&self) -> impl Iterator<Item = (u32, &[u8])> {
        (0..).zip(&self.words).filter_map(|(id, word)| match word.split_first() {
            Some((&SPECIAL, text)) => Some((id, text)),
            _ => None,
        })
    }

    /// In the form that llguidance works on; `None` without an id that ends an answer.
    pub(crate) fn token_env(&self) -> Option<TokEnv> {
        let first = *self.end_of_sequence.first()?;
        let info = TokRxInfo::new(self.words.len() as u32, first);
        let trie = TokTrie::from(&info, &self.words).with_eos_tokens(&self.end_of_sequence);
        Some(Arc::new(ApproximateTokEnv::new(trie)))
    }
}
