//! Whether a grammar can be used at all, found out without the model's vocabulary.

use serde::{Deserialize, Serialize};

use crate::{Compiler, Grammar, GrammarError, Vocabulary};

/// Bytes of the trial answer: enough to get past what a grammar begins with.
const TRIAL_BYTES: usize = 64;

/// What a check needs of a vocabulary: ids and special tokens that a grammar may name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckFacts {
    pub vocab_size: u32,
    pub special: Vec<(u32, String)>,
}

impl CheckFacts {
    pub fn of(vocabulary: &Vocabulary) -> Self {
        let text = |text: &[u8]| String::from_utf8_lossy(text).into_owned();
        let special = vocabulary.special().map(|(id, bytes)| (id, text(bytes)));
        Self { vocab_size: vocabulary.words.len() as u32, special: special.collect() }
    }
}

/// Compiles the grammar over single bytes and writes the beginning of an answer under it.
///
/// What a hostile grammar costs in time and memory has no useful bound here: run it where it can be
/// ended from outside.
///
/// # Errors
/// The grammar is wrong, beyond the limits, or matches nothing.
pub fn check(grammar: &Grammar, facts: &CheckFacts) -> Result<(), GrammarError> {
    let size = facts.vocab_size as usize;
    let mut words = vec![(Vec::new(), false); size];
    for (id, text) in &facts.special {
        if let Some(word) = words.get_mut(*id as usize) {
            *word = (text.clone().into_bytes(), true);
        }
    }
    // Bytes and an end of their own, after the model's ids.
    words.extend((0..=u8::MAX).map(|byte| (vec![byte], false)));
    let end = words.len() as u32;
    words.push((b"<end of answer>".to_vec(), true));
    let tokens = words.iter().map(|(bytes, special)| (bytes.as_slice(), *special));
    let vocabulary = Vocabulary::new(tokens, &[end]);
    let env = vocabulary.token_env().ok_or(GrammarError::NoVocabulary)?;
    let mut matcher = Compiler::with_slices(&env, &[])?.compile(grammar)?;
    let mut state = 0x9e37_79b9_u32;
    for position in 0..TRIAL_BYTES {
        let mask = matcher.mask().map_err(|error| match position {
            0 => GrammarError::Empty,
            _ => error,
        })?;
        let next: Vec<u32> = mask.tokens().into_iter().filter(|token| *token != end).collect();
        if next.is_empty() {
            return Ok(());
        }
        // Marsaglia's xorshift: any path will do, the same one each time.
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        matcher.advance(&[next[state as usize % next.len()]])?;
        if matcher.is_over() {
            return Ok(());
        }
    }
    Ok(())
}
