//! All sequences of the epoch. Every rank sees the same steps and so holds the same sequences,
//! lengths and block tables: what is refused here is refused alike on every rank.

use std::collections::HashMap;

use crate::{
    sequence::Sequence,
    step::{BlockUpdate, NewSequence},
};

/// What one step, one sequence and one token may be at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub max_batch_tokens: usize,
    pub max_sequences: usize,
    pub max_model_len: usize,
    pub num_blocks: usize,
    pub vocab_size: usize,
}

/// One bad sequence; the rest of the step goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequenceError {
    pub sequence: u64,
    pub message: String,
    /// What its grammar asks for cannot be had.
    pub grammar: bool,
}

impl SequenceError {
    pub fn new(sequence: u64, message: impl Into<String>) -> Self {
        Self { sequence, message: message.into(), grammar: false }
    }

    pub fn of_grammar(sequence: u64, message: impl Into<String>) -> Self {
        Self { grammar: true, ..Self::new(sequence, message) }
    }
}

#[derive(Debug, Default)]
pub struct Sequences {
    by_id: HashMap<u64, Sequence>,
    next_generation: u64,
}

impl Sequences {
    pub fn get(&self, id: u64) -> Option<&Sequence> {
        self.by_id.get(&id)
    }

    pub fn get_mut(&mut self, id: u64) -> Option<&mut Sequence> {
        self.by_id.get_mut(&id)
    }

    /// The sequence, unless it was dropped since, and perhaps its id used again.
    pub fn of_generation(&mut self, id: u64, generation: u64) -> Option<&mut Sequence> {
        self.by_id.get_mut(&id).filter(|sequence| sequence.generation == generation)
    }

    pub fn clear(&mut self) {
        self.by_id.clear();
    }

    /// Forgets sequences. An unknown one is no error: it may have been refused when it was new.
    pub fn drop_all(&mut self, ids: &[u64]) {
        for id in ids {
            self.by_id.remove(id);
        }
    }

    pub fn admit(&mut self, new: Vec<NewSequence>, limits: &Limits) -> Vec<SequenceError> {
        new.into_iter().filter_map(|new| self.admit_one(new, limits).err()).collect()
    }

    fn admit_one(&mut self, new: NewSequence, limits: &Limits) -> Result<(), SequenceError> {
        let refuse = |message: String| Err(SequenceError::new(new.id, message));
        if self.by_id.contains_key(&new.id) {
            return refuse("id: already in use; drop it first".into());
        }
        let len = new.tokens.len();
        if len == 0 || len > limits.max_model_len {
            return refuse(format!("tokens: {len}, but must be 1 to {}", limits.max_model_len));
        }
        if new.prompt_len > len {
            return refuse(format!("prompt_len: {}, but at most tokens = {len}", new.prompt_len));
        }
        if let Some(token) = new.tokens.iter().find(|&&token| token as usize >= limits.vocab_size) {
            return refuse(format!(
                "tokens: {token}, but the vocabulary has {}",
                limits.vocab_size
            ));
        }
        let sampling = match &new.sampling {
            Ok(sampling) => sampling.clone(),
            Err(message) => return refuse(message.clone()),
        };
        let scoring = match &new.scoring {
            Ok(scoring) => *scoring,
            Err(message) => return refuse(message.clone()),
        };
        self.next_generation += 1;
        let sequence = Sequence {
            generation: self.next_generation,
            len,
            tokens: new.tokens,
            prompt_len: new.prompt_len,
            computed: None,
            blocks: Vec::new(),
            sampling,
            scoring,
        };
        self.by_id.insert(new.id, sequence);
        Ok(())
    }

    pub fn append_blocks(
        &mut self,
        updates: &[BlockUpdate],
        limits: &Limits,
    ) -> Vec<SequenceError> {
        updates.iter().filter_map(|update| self.append_to_one(update, limits).err()).collect()
    }

    fn append_to_one(
        &mut self,
        update: &BlockUpdate,
        limits: &Limits,
    ) -> Result<(), SequenceError> {
        let refuse = |message: String| Err(SequenceError::new(update.sequence, message));
        let Some(sequence) = self.by_id.get_mut(&update.sequence) else {
            return refuse("blocks: for an unknown sequence".into());
        };
        if let Some(block) = update.append.iter().find(|&&b| b as usize >= limits.num_blocks) {
            return refuse(format!("blocks: {block}, but there are {}", limits.num_blocks));
        }
        sequence.blocks.extend_from_slice(&update.append);
        Ok(())
    }
}
