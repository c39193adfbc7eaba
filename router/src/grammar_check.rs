//! Whether a client's grammar can be used, found out in a process of its own.
//!
//! What a hostile schema or regular expression costs has no useful bound inside a process: an
//! intersection of patterns can ask for gigabytes before any counter notices. So the first request
//! with a grammar starts this same program as a checker with a limit on processor time and memory;
//! what it said is remembered.

pub mod checker;

use std::{
    path::PathBuf,
    process::Stdio,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context, anyhow};
use tokio::{io::AsyncWriteExt, process::Command, sync::Semaphore};
use trireme_grammar::{Cache, CheckFacts, Grammar};

use crate::{api::Constraint, error::RouterError};
use checker::{Order, Verdict};

/// Grammars whose verdict is remembered.
const KNOWN_MOST: usize = 1024;
const KNOWN_BYTES_MOST: usize = 16 << 20;
/// Checkers at once: the cores are the shards'.
const CHECKERS: usize = 2;
/// Checks that may wait for their turn, and for how long; most take tens of milliseconds.
const WAITING_MOST: usize = 1024;
const TURN_LIMIT: Duration = Duration::from_secs(10);
/// A checker ends itself long before; this is for one that gets no processor.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// Checks grammars of one model.
pub struct GrammarChecks {
    /// The program that becomes a checker.
    program: PathBuf,
    facts: CheckFacts,
    known: Mutex<Cache<Result<(), String>>>,
    turns: Semaphore,
    places: Semaphore,
}

impl GrammarChecks {
    pub fn new(program: PathBuf, facts: CheckFacts) -> Self {
        Self {
            program,
            facts,
            known: Mutex::new(Cache::new(KNOWN_MOST, KNOWN_BYTES_MOST)),
            turns: Semaphore::new(CHECKERS),
            places: Semaphore::new(WAITING_MOST),
        }
    }

    /// # Errors
    /// `Invalid` with the constraint's field: the grammar is wrong, or takes too much to compile.
    pub async fn check(&self, constraint: &Constraint) -> Result<(), RouterError> {
        let Constraint { field, grammar, .. } = constraint;
        let told = |verdict: Result<(), String>| {
            verdict
                .map_err(|why| RouterError::Invalid { field, message: format!("{field}: {why}") })
        };
        if let Some(verdict) = self.known(grammar) {
            return told(verdict);
        }
        let overloaded = || RouterError::Overloaded { limit: WAITING_MOST, retry_after_s: 1 };
        let _place = self.places.try_acquire().map_err(|_| overloaded())?;
        let turn = tokio::time::timeout(TURN_LIMIT, self.turns.acquire()).await;
        let closed = |error| RouterError::Internal(anyhow::Error::new(error));
        let _turn = turn.map_err(|_| overloaded())?.map_err(closed)?;
        // The same grammar may have had its turn meanwhile, as with several choices of a request.
        if let Some(verdict) = self.known(grammar) {
            return told(verdict);
        }
        let verdict = self.ask(grammar).await.map_err(RouterError::Internal)?;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.insert(grammar, verdict.clone());
        told(verdict)
    }

    fn known(&self, grammar: &Grammar) -> Option<Result<(), String>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).get(grammar).cloned()
    }

    async fn ask(&self, grammar: &Grammar) -> anyhow::Result<Result<(), String>> {
        let order = serde_json::to_vec(&Order { grammar, facts: &self.facts })?;
        let mut child = Command::new(&self.program)
            .arg(checker::VERB)
            .env_clear()
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .context("start a grammar checker")?;
        let mut input = child.stdin.take().ok_or_else(|| anyhow!("a checker without input"))?;
        let answer = async {
            // One that ended early is judged by its end.
            let _ = input.write_all(&order).await;
            drop(input);
            child.wait_with_output().await
        };
        let Ok(output) = tokio::time::timeout(ANSWER_LIMIT, answer).await else {
            return Ok(Err(checker::TOO_SLOW.to_owned()));
        };
        let output = output.context("hear a grammar checker")?;
        match serde_json::from_slice(&output.stdout) {
            Ok(Verdict { refused }) => Ok(refused.map_or(Ok(()), Err)),
            Err(_) => Ok(Err(checker::ended(output.status))),
        }
    }
}
