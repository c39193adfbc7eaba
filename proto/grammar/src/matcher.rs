//! One answer on its way through a grammar.

use llguidance::{TokenParser, toktrie::SimpleVob};

use crate::GrammarError;

/// Where one answer stands in its grammar.
pub struct Matcher {
    inner: llguidance::Matcher,
}

impl Matcher {
    pub(crate) fn new(parser: TokenParser) -> Self {
        Self { inner: llguidance::Matcher::new(Ok(parser)) }
    }

    /// An independent matcher at the same place.
    pub fn fork(&self) -> Self {
        Self { inner: self.inner.deep_clone() }
    }

    /// Takes tokens that were generated. What comes after the end of the answer is nobody's.
    ///
    /// # Errors
    /// A token that the grammar does not allow.
    pub fn advance(&mut self, tokens: &[u32]) -> Result<(), GrammarError> {
        for &token in tokens {
            if self.inner.is_stopped() && !self.inner.is_error() {
                return Ok(());
            }
            self.inner.consume_token(token).map_err(stuck)?;
        }
        Ok(())
    }

    /// The tokens that may come next; where the answer is complete, those that end it.
    ///
    /// # Errors
    /// The limits of one mask are reached.
    pub fn mask(&mut self) -> Result<Mask, GrammarError> {
        let allowed = self.inner.compute_mask_or_eos().map_err(stuck)?;
        Ok(Mask { allowed, ends: self.inner.is_stopped() })
    }

    /// The answer cannot be continued.
    pub fn is_over(&self) -> bool {
        self.inner.is_stopped()
    }
}

fn stuck(error: impl std::fmt::Display) -> GrammarError {
    let text = error.to_string();
    GrammarError::Stuck(text.lines().next().unwrap_or_default().to_owned())
}

/// The tokens that a grammar allows at one place.
#[derive(Clone, Debug)]
pub struct Mask {
    allowed: SimpleVob,
    ends: bool,
}

impl Mask {
    /// `tokens` of a vocabulary of `vocab_size`; `ends`: they end the answer.
    pub fn new(vocab_size: usize, tokens: &[u32], ends: bool) -> Self {
        let mut allowed = SimpleVob::alloc(vocab_size);
        tokens.iter().for_each(|&token| allowed.allow_token(token));
        Self { allowed, ends }
    }

    /// Nothing but the end may follow.
    pub fn ends(&self) -> bool {
        self.ends
    }

    pub fn allows(&self, token: u32) -> bool {
        self.word(token / 32) >> (token % 32) & 1 == 1
    }

    /// Makes the tokens that are not allowed impossible. `logits[0]` is of token `first`.
    pub fn apply(&self, first: u32, logits: &mut [f32]) {
        let mut rest = logits;
        let mut token = first;
        while !rest.is_empty() {
            let bit = token % 32;
            let len = rest.len().min((32 - bit) as usize);
            let (mine, later) = rest.split_at_mut(len);
            match self.word(token / 32) >> bit {
                0 => mine.fill(f32::NEG_INFINITY),
                bits => {
                    for (index, logit) in mine.iter_mut().enumerate() {
                        if bits >> index & 1 == 0 {
                            *logit = f32::NEG_INFINITY;
                        }
                    }
                }
            }
            token += len as u32;
            rest = later;
        }
    }

    pub fn tokens(&self) -> Vec<u32> {
        self.allowed.to_list()
    }

    /// Ids beyond the vocabulary are not allowed.
    fn word(&self, index: u32) -> u32 {
        self.allowed.as_slice().get(index as usize).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Compiler, Grammar, Vocabulary, Whitespace};

    /// "a" to "e" as ids 40 to 44, the end as 3.
    fn vocabulary() -> Vocabulary {
        let mut words: Vec<(Vec<u8>, bool)> = vec![(Vec::new(), false); 45];
        for (id, letter) in (40..).zip(b'a'..=b'e') {
            words[id] = (vec![letter], false);
        }
        words[3] = (b"<end>".to_vec(), false);
        Vocabulary::new(words.iter().map(|(bytes, special)| (&bytes[..], *special)), &[3])
    }

    /// After `taken`, the grammar allows `allowed`, whichever way the mask is read.
    fn check(regex: &str, taken: &[u32], allowed: &[u32]) {
        let compiler = Compiler::new(&vocabulary()).expect("a vocabulary");
        let mut matcher = compiler.compile(&Grammar::regex(regex)).expect(regex);
        matcher.advance(taken).expect(regex);
        let mask = matcher.mask().expect(regex);
        assert_eq!(mask.tokens(), allowed, "{regex} after {taken:?}");
        for first in [0, 1, 31, 32, 41] {
            let mut logits = vec![1.0; 70 - first as usize];
            mask.apply(first, &mut logits);
            for (token, logit) in (first..).zip(logits) {
                assert_eq!(logit == 1.0, allowed.contains(&token), "{regex}: {token}");
                assert_eq!(mask.allows(token), allowed.contains(&token), "{regex}: {token}");
            }
        }
    }

    #[test]
    fn masks_allow_what_the_grammar_does() {
        check("ab|c", &[], &[40, 42]);
        check("ab|c", &[40], &[41]);
        check("ab|c", &[42], &[3]);
        check("ab|c", &[42, 3], &[3]);
        check("ab|c", &[42, 3, 44], &[3]);
        check("a*", &[40], &[3, 40]);
        check("[b-d]{2}", &[43], &[41, 42, 43]);
    }

    /// `text` goes as far as `taken` bytes under a list of integers.
    fn check_whitespace(whitespace: Whitespace<'_>, text: &str, taken: usize) {
        let mut words: Vec<(Vec<u8>, bool)> =
            (0..=u8::MAX).map(|byte| (vec![byte], false)).collect();
        words.push((b"<end>".to_vec(), true));
        let words = words.iter().map(|(bytes, special)| (&bytes[..], *special));
        let compiler = Compiler::new(&Vocabulary::new(words, &[256])).expect("a vocabulary");
        let list = serde_json::json!({"type": "array", "items": {"type": "integer"}});
        let grammar = Grammar::json_schema(&list, whitespace).expect("a schema");
        let mut matcher = compiler.compile(&grammar).expect("it compiles");
        let allowed = |byte: &u8| {
            let token = u32::from(*byte);
            matcher.mask().is_ok_and(|mask| mask.allows(token)) && matcher.advance(&[token]).is_ok()
        };
        assert_eq!(text.bytes().take_while(allowed).count(), taken, "{text:?}");
    }

    #[test]
    fn blanks_between_the_parts_of_json_are_bounded() {
        for text in ["[1,2]", "[1, 2]", "[ 1 , 2 ]", "[\n  1,\n  2\n]", "[\n\t1]"] {
            check_whitespace(Whitespace::Some, text, text.len());
        }
        check_whitespace(Whitespace::Some, "[  1", 2);
        check_whitespace(Whitespace::Some, "[ \n1", 2);
        check_whitespace(Whitespace::Some, "[\n\n", 2);
        check_whitespace(Whitespace::Some, &format!("[\n{}1", " ".repeat(21)), 22);
        check_whitespace(Whitespace::Pattern("_{2}"), "[__1", 4);
        check_whitespace(Whitespace::Pattern("_{2}"), "[ ", 1);
    }

    #[test]
    fn forks_go_their_own_ways() {
        let compiler = Compiler::new(&vocabulary()).expect("a vocabulary");
        let mut one = compiler.compile(&Grammar::regex("a(b|c)")).expect("compiles");
        one.advance(&[40]).expect("a");
        let mut other = one.fork();
        other.advance(&[41]).expect("ab");
        assert!(other.is_over() && !one.is_over());
        assert!(matches!(one.advance(&[40]), Err(GrammarError::Stuck(_))));
        assert!(matches!(one.mask(), Err(GrammarError::Stuck(_))), "it stays so");
    }
}
