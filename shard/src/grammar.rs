//! Grammars on the last stage: compiled beside the steps, asked for masks while the forward runs.
//!
//! Every rank of the stage keeps its own matchers and advances them with the tokens that all of
//! them sampled. A matcher is a function of grammar and tokens, so the ranks agree without talking,
//! and one that is lost (preemption, a restart) is made again from the tokens.

mod budget;
mod masks;

use std::{
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use tokio::sync::{Semaphore, oneshot};
use trireme_grammar::{Cache, Compiler, Grammar, GrammarError, Matcher, Vocabulary};
use trireme_proto::shard::v1 as proto;

use budget::Budget;
pub use masks::{Masks, StepMasks};

/// Compilers recurse over the grammar; its depth is bounded by what this holds.
const STACK_BYTES: usize = 16 << 20;
/// Grammars whose budget is remembered; their text.
const BUDGETS_MOST: usize = 1024;
const BUDGETS_BYTES_MOST: usize = 4 << 20;

/// The compiler of the epoch's vocabulary, shared by calls and steps.
pub struct Grammars {
    state: Mutex<State>,
    budgets: Mutex<Cache<Arc<Budget>>>,
    /// One grammar at a time is compiled ahead: the cores are the steps'.
    turn: Arc<Semaphore>,
}

#[derive(Default)]
struct State {
    vocabulary: Option<Arc<Vocabulary>>,
    /// Made with the first grammar.
    compiler: Option<Arc<Compiler>>,
}

impl Default for Grammars {
    fn default() -> Self {
        let budgets = Mutex::new(Cache::new(BUDGETS_MOST, BUDGETS_BYTES_MOST));
        Self { state: Mutex::default(), budgets, turn: Arc::new(Semaphore::new(1)) }
    }
}

impl Grammars {
    /// What is compiled stays, unless the vocabulary is another one.
    pub fn set_vocabulary(&self, vocabulary: Option<Vocabulary>) {
        let mut state = self.lock();
        if state.vocabulary.as_deref() != vocabulary.as_ref() {
            *state = State { vocabulary: vocabulary.map(Arc::new), compiler: None };
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A matcher at the start of an answer; compiles where it must.
    ///
    /// # Errors
    /// There is no vocabulary, or the grammar is beyond the limits, or has spent its budget.
    pub fn matcher(&self, grammar: &Grammar) -> Result<Matcher, GrammarError> {
        self.budget(grammar).check()?;
        self.compiler()?.compile(grammar)
    }

    /// Shared by all answers under the grammar.
    fn budget(&self, grammar: &Grammar) -> Arc<Budget> {
        let mut budgets = self.budgets.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = budgets.get(grammar) {
            return known.clone();
        }
        let fresh = Arc::new(Budget::default());
        budgets.insert(grammar, fresh.clone());
        fresh
    }

    fn compiler(&self) -> Result<Arc<Compiler>, GrammarError> {
        let mut state = self.lock();
        if let Some(compiler) = &state.compiler {
            return Ok(compiler.clone());
        }
        let vocabulary = state.vocabulary.clone().ok_or(GrammarError::NoVocabulary)?;
        let compiler = Arc::new(Compiler::new(&vocabulary)?);
        state.compiler = Some(compiler.clone());
        Ok(compiler)
    }

    /// Compiles ahead of the first sequence, on a thread of its own; how long that took.
    ///
    /// # Errors
    /// As [`Self::matcher`].
    pub async fn prepare(self: Arc<Self>, grammar: Grammar) -> Result<Duration, GrammarError> {
        let failed = |cause: String| GrammarError::Invalid(format!("it was not compiled: {cause}"));
        let this = self.clone();
        let turn = self.turn.clone().acquire_owned().await;
        let turn = turn.map_err(|error| failed(error.to_string()))?;
        let (done, result) = oneshot::channel();
        let work = move || {
            let start = Instant::now();
            // The caller may have gone; what was compiled is kept all the same.
            drop(done.send(this.matcher(&grammar).map(|_| start.elapsed())));
            drop(turn);
        };
        let thread = thread::Builder::new().name("grammar".into()).stack_size(STACK_BYTES);
        thread.spawn(work).map_err(|error| failed(error.to_string()))?;
        result.await.map_err(|_| failed("its thread ended".to_owned()))?
    }
}

/// A vocabulary from the wire, or what is wrong with it.
pub fn vocabulary(wire: &proto::Vocabulary) -> Result<Vocabulary, String> {
    let mut rest = wire.words.as_slice();
    let mut words = Vec::with_capacity(wire.lengths.len());
    for &length in &wire.lengths {
        let (word, later) = rest.split_at_checked(length as usize).ok_or_else(|| {
            format!("vocabulary.lengths: more than the {} bytes of words", wire.words.len())
        })?;
        words.push(word.to_vec());
        rest = later;
    }
    if !rest.is_empty() {
        return Err(format!("vocabulary.lengths: {} bytes of words are no id's", rest.len()));
    }
    if let Some(id) = wire.end_of_sequence.iter().find(|id| **id as usize >= words.len()) {
        return Err(format!("vocabulary.end_of_sequence: {id}, but there are {} ids", words.len()));
    }
    Ok(Vocabulary { words, end_of_sequence: wire.end_of_sequence.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wire() -> proto::Vocabulary {
        proto::Vocabulary {
            words: b"ab\xffend".to_vec(),
            lengths: vec![1, 0, 1, 4],
            end_of_sequence: vec![3],
        }
    }

    fn check(change: impl FnOnce(&mut proto::Vocabulary), words: &str) {
        let mut wire = wire();
        change(&mut wire);
        let error = vocabulary(&wire).expect_err(words);
        assert!(error.contains(words), "{error}");
    }

    #[test]
    fn vocabularies_are_checked() {
        let read = vocabulary(&wire()).expect("it is whole");
        assert_eq!(read.words, [&b"a"[..], b"", b"b", b"\xffend"]);
        assert_eq!(read.end_of_sequence, [3]);
        check(|wire| wire.lengths.push(1), "more than the 6 bytes");
        check(|wire| wire.lengths[0] = u32::MAX, "more than the 6 bytes");
        check(|wire| wire.lengths.truncate(wire.lengths.len() - 1), "4 bytes of words are no id's");
        check(|wire| wire.end_of_sequence.push(4), "4, but there are 4 ids");
    }

    #[tokio::test]
    async fn grammars_are_compiled_ahead_or_refused() {
        let grammars = Arc::new(Grammars::default());
        let prepare = |text: &str| grammars.clone().prepare(Grammar::regex(text));
        assert_eq!(prepare("a+").await, Err(GrammarError::NoVocabulary));
        grammars.set_vocabulary(Some(vocabulary(&wire()).expect("it is whole")));
        assert!(prepare("a+").await.is_ok());
        assert!(matches!(prepare("(").await, Err(GrammarError::Invalid(_))));
        let mut matcher = grammars.matcher(&Grammar::regex("a+")).expect("it is known");
        assert_eq!(matcher.mask().expect("a mask").tokens(), [0]);
        // Without an end nothing could end an answer.
        let endless =
            Vocabulary { end_of_sequence: Vec::new(), ..vocabulary(&wire()).expect("whole") };
        grammars.set_vocabulary(Some(endless));
        assert_eq!(prepare("a+").await, Err(GrammarError::NoVocabulary));
    }
}
