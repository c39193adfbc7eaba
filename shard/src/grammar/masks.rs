//! The masks of a step: made by a few threads from its start, needed at its end.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
};

use tracing::error;
use trireme_grammar::{Grammar, GrammarError, Mask, Matcher};

use super::{Budget, Grammars, STACK_BYTES};
use crate::{batch::Batch, sampler::Constraint, sequences::Sequences};

/// A mask takes tens of microseconds: few threads keep up with a full step.
const WORKERS: usize = 2;

/// Makes the masks of this rank's sequences.
#[derive(Default)]
pub struct Masks {
    grammars: Arc<Grammars>,
    /// Between steps; with a step's masks under way they are with the workers.
    waiting: HashMap<u64, Place>,
    workers: Option<Workers>,
}

/// Where a sequence stands in its grammar.
struct Place {
    generation: u64,
    /// Tokens of the sequence that the matcher has taken, its prompt included.
    taken: usize,
    matcher: Result<Matcher, GrammarError>,
    budget: Arc<Budget>,
}

struct Job {
    sequence: u64,
    grammar: Arc<Grammar>,
    /// `None`: the sequence is new here.
    place: Option<Place>,
    generation: u64,
    /// After those that the matcher has taken.
    tokens: Vec<u32>,
    taken: usize,
    done: Sender<Done>,
}

struct Done {
    sequence: u64,
    place: Place,
    mask: Result<Mask, GrammarError>,
}

struct Workers {
    jobs: Sender<Job>,
    done: Sender<Done>,
    results: Receiver<Done>,
    under_way: usize,
}

/// What the grammars of one step say.
#[derive(Default)]
pub struct StepMasks {
    masks: HashMap<u64, Result<Mask, GrammarError>>,
}

impl StepMasks {
    /// For a sequence that has a grammar or not.
    pub fn constraint(&self, sequence: u64, has_grammar: bool) -> Constraint<'_> {
        match self.masks.get(&sequence) {
            Some(Ok(mask)) => Constraint::Mask(mask),
            Some(Err(_)) => Constraint::Broken,
            None if has_grammar => Constraint::Broken,
            None => Constraint::Free,
        }
    }

    /// Why a sequence has no mask, in more words than the other ranks know.
    pub fn error(&self, sequence: u64) -> Option<String> {
        self.masks.get(&sequence)?.as_ref().err().map(GrammarError::to_string)
    }
}

impl Masks {
    pub fn new(grammars: Arc<Grammars>) -> Self {
        Self { grammars, ..Self::default() }
    }

    /// Forgets all sequences. What a lost step left with the workers is nobody's.
    pub fn clear(&mut self) {
        self.waiting.clear();
        self.workers = None;
    }

    pub fn drop_all(&mut self, ids: &[u64]) {
        for id in ids {
            self.waiting.remove(id);
        }
    }

    /// Starts on the masks of a step. Its sequences' tokens are all known here.
    pub fn begin(&mut self, batch: &Batch, sequences: &Sequences) {
        for id in batch.sampled_sequences() {
            let Some(sequence) = sequences.get(id) else { continue };
            let Some(grammar) = sequence.sampling.grammar.clone() else { continue };
            let generation = sequence.generation;
            let place = self.waiting.remove(&id).filter(|place| place.generation == generation);
            let taken = place.as_ref().map_or(sequence.prompt_len, |place| place.taken);
            let tokens = sequence.tokens.get(taken..).unwrap_or_default().to_vec();
            let workers = self.workers.get_or_insert_with(|| Workers::start(&self.grammars));
            let done = workers.done.clone();
            let job = Job { sequence: id, grammar, place, generation, tokens, taken, done };
            if workers.jobs.send(job).is_ok() {
                workers.under_way += 1;
            }
        }
    }

    /// Waits for the masks of the step that began. The budgets of the grammars bound the wait.
    pub fn finish(&mut self) -> StepMasks {
        let mut masks = StepMasks::default();
        let Some(workers) = &mut self.workers else { return masks };
        for _ in 0..std::mem::take(&mut workers.under_way) {
            let Ok(Done { sequence, place, mask }) = workers.results.recv() else { break };
            self.waiting.insert(sequence, place);
            masks.masks.insert(sequence, mask);
        }
        masks
    }
}

impl Workers {
    fn start(grammars: &Arc<Grammars>) -> Self {
        let (jobs, inbox) = channel::<Job>();
        let (done, results) = channel();
        let inbox = Arc::new(Mutex::new(inbox));
        for _ in 0..WORKERS {
            let (inbox, grammars) = (inbox.clone(), grammars.clone());
            let thread = thread::Builder::new().name("masks".into()).stack_size(STACK_BYTES);
            if let Err(error) = thread.spawn(move || work(&inbox, &grammars)) {
                error!(%error, "a thread for grammar masks did not start");
            }
        }
        Self { jobs, done, results, under_way: 0 }
    }
}

/// Ends when the sending end of the jobs is gone.
fn work(inbox: &Mutex<Receiver<Job>>, grammars: &Grammars) {
    loop {
        let next = inbox.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(job) = next else { return };
        let Job { sequence, grammar, place, generation, tokens, taken, done } = job;
        let mut place = place.unwrap_or_else(|| Place {
            generation,
            taken,
            matcher: grammars.matcher(&grammar),
            budget: grammars.budget(&grammar),
        });
        let budget = &place.budget;
        let mask = place.matcher.as_mut().map_err(|error| error.clone()).and_then(|matcher| {
            budget.spend(|| {
                matcher.advance(&tokens)?;
                matcher.mask()
            })
        });
        place.taken += tokens.len();
        // Nobody waits after a reset.
        drop(done.send(Done { sequence, place, mask }));
    }
}
