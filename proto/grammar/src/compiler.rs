//! Grammars to matchers over one vocabulary.

use std::sync::{Mutex, PoisonError};

use llguidance::{
    ParserFactory,
    api::{GrammarWithLexer, ParserLimits, TopLevelGrammar},
    earley::SlicedBiasComputer,
    toktrie::{InferenceCapabilities, TokEnv},
};

use crate::{Cache, Grammar, GrammarError, Kind, Matcher, Vocabulary};

/// Compiled grammars that are kept.
const COMPILED_MOST: usize = 256;
/// Of their text; compiled, a byte becomes a hundred.
const COMPILED_BYTES_MOST: usize = 1 << 20;
/// Steps of building the lexer; about 50,000 take a millisecond.
const LEXER_FUEL: u64 = 1_000_000;
/// Lexer steps of one mask; about 14,000 take a millisecond.
const MASK_LEXER_FUEL: u64 = 200_000;
/// Parser items of one mask; about 20,000 take a millisecond.
const MASK_ITEMS: usize = 50_000;
/// Parser items of one byte.
const BYTE_ITEMS: usize = 2_000;
/// Lexer states of one answer, of 1 to 2 kB each.
const LEXER_STATES: usize = 10_000;
/// Symbols in the productions of a grammar.
const GRAMMAR_SYMBOLS: usize = 200_000;

/// Compiles grammars and keeps those that came lately.
pub struct Compiler {
    factory: ParserFactory,
    compiled: Mutex<Cache<Result<Matcher, GrammarError>>>,
}

impl Compiler {
    /// # Errors
    /// `NoVocabulary` where the vocabulary has no id that ends an answer.
    pub fn new(vocabulary: &Vocabulary) -> Result<Self, GrammarError> {
        let env = vocabulary.token_env().ok_or(GrammarError::NoVocabulary)?;
        Self::with_slices(&env, &SlicedBiasComputer::general_slices())
    }

    /// `slices`: sets of tokens whose part in a mask is worked out once.
    pub(crate) fn with_slices(env: &TokEnv, slices: &[String]) -> Result<Self, GrammarError> {
        // Every token is sampled: none is forced without a step of its own.
        let capabilities = InferenceCapabilities::default();
        let mut factory = ParserFactory::new(env, capabilities, slices).map_err(invalid)?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            max_items_in_row: BYTE_ITEMS,
            initial_lexer_fuel: LEXER_FUEL,
            step_lexer_fuel: MASK_LEXER_FUEL,
            step_max_items: MASK_ITEMS,
            max_lexer_states: LEXER_STATES,
            max_grammar_size: GRAMMAR_SYMBOLS,
            precompute_large_lexemes: false,
            // Answers stay out of errors, and so out of logs.
            verbose_errors: false,
        };
        Ok(Self { factory, compiled: Mutex::new(Cache::new(COMPILED_MOST, COMPILED_BYTES_MOST)) })
    }

    /// A matcher at the start of an answer. It shares nothing with others of the same grammar, so
    /// that what it costs and where its limits end depend on its own answer alone.
    ///
    /// # Errors
    /// The grammar is wrong or beyond the limits.
    pub fn compile(&self, grammar: &Grammar) -> Result<Matcher, GrammarError> {
        let lock = || self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = lock().get(grammar) {
            return known.as_ref().map(Matcher::fork).map_err(Clone::clone);
        }
        // Not under the lock: others go on meanwhile.
        let fresh = self.compile_anew(grammar);
        let answer = fresh.as_ref().map(Matcher::fork).map_err(Clone::clone);
        lock().insert(grammar, fresh);
        answer
    }

    fn compile_anew(&self, grammar: &Grammar) -> Result<Matcher, GrammarError> {
        let parsed = match grammar.kind {
            Kind::JsonSchema => {
                let schema = serde_json::from_str(&grammar.text).map_err(|error| {
                    GrammarError::Invalid(format!("the schema is not valid JSON: {error}"))
                })?;
                GrammarWithLexer::from_json_schema(schema)
            }
            Kind::Regex => GrammarWithLexer::from_regex(&grammar.text),
            Kind::Lark => GrammarWithLexer::from_lark(grammar.text.clone()),
        };
        let parser = self.factory.create_parser(TopLevelGrammar::from_grammar(parsed));
        Ok(Matcher::new(parser.map_err(invalid)?))
    }
}

/// The first line says what is wrong; what follows it repeats the grammar.
fn invalid(error: impl std::fmt::Display) -> GrammarError {
    const SHOWN_CHARS: usize = 300;
    let text = error.to_string();
    if text.starts_with("panic:") {
        // What follows speaks to the compiler's makers.
        return GrammarError::Invalid(
            "a number or a nesting in it is beyond what is supported".into(),
        );
    }
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let said: String = lines.join(" ").chars().take(SHOWN_CHARS).collect();
    GrammarError::Invalid(said)
}
