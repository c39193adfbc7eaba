//! Sampled tokens go from the last stage back to the first through the collectives, rank by rank.
//!
//! The first stage receives them in step order and as late as it can: just before it needs one, so
//! that steps in flight overlap over the stages. Stages between need no tokens.

use std::collections::VecDeque;

use trireme_collectives::CollectiveError;

use crate::{
    batch::{Batch, CHOSEN},
    device::Device,
    in_flight::InFlight,
    sequences::Sequences,
    weights::Place,
};

/// Stands for a token that could not be sampled.
const NO_TOKEN: u32 = u32::MAX;

/// This rank's part in the return of tokens.
pub enum TokenReturn {
    /// One stage: what is sampled here is known here.
    Here,
    First {
        from: usize,
        pending: VecDeque<Vec<(u64, u64)>>,
        depth: usize,
    },
    Last {
        to: usize,
    },
    Between,
}

impl TokenReturn {
    pub fn new(place: &Place) -> Self {
        let (tp, pp) = (place.split.tp, place.split.pp);
        let tp_rank = place.slice.tp_rank;
        match (place.slice.first_stage, place.slice.last_stage) {
            (true, true) => Self::Here,
            (true, false) => {
                Self::First { from: (pp - 1) * tp + tp_rank, pending: VecDeque::new(), depth: pp }
            }
            (false, true) => Self::Last { to: tp_rank },
            (false, false) => Self::Between,
        }
    }

    /// First stage: the step's sampled sequences will come back as one message. Keeps at most
    /// `pp` messages outstanding, which the router's `pp + 1` steps in flight have already filled.
    pub fn expect<D: Device>(
        &mut self,
        device: &mut D,
        batch: &Batch,
        sequences: &mut Sequences,
    ) -> Result<(), CollectiveError> {
        let Self::First { pending, depth, .. } = self else { return Ok(()) };
        let sampled: Vec<_> = batch
            .sampled_sequences()
            .filter_map(|id| sequences.get(id).map(|sequence| (id, sequence.generation)))
            .collect();
        if !sampled.is_empty() {
            pending.push_back(sampled);
        }
        if pending.len() > *depth {
            self.receive(device, sequences)?;
        }
        Ok(())
    }

    /// First stage: takes the oldest message, if one is outstanding.
    fn receive<D: Device>(
        &mut self,
        device: &mut D,
        sequences: &mut Sequences,
    ) -> Result<bool, CollectiveError> {
        let Self::First { from, pending, .. } = self else { return Ok(false) };
        let Some(expected) = pending.pop_front() else { return Ok(false) };
        let mut tokens = vec![0; expected.len()];
        device.recv_tokens(*from, &mut tokens)?;
        for ((id, generation), token) in expected.into_iter().zip(tokens) {
            if let Some(sequence) = sequences.of_generation(id, generation) {
                sequence.tokens.push(if token == NO_TOKEN { 0 } else { token });
            }
        }
        Ok(true)
    }

    /// First stage: fills the batch's input tokens, waiting for those still being sampled, but not for
    /// those that the step in flight on this device chooses.
    pub fn fill<D: Device>(
        &mut self,
        device: &mut D,
        batch: &mut Batch,
        sequences: &mut Sequences,
        in_flight: Option<&InFlight>,
    ) -> Result<(), CollectiveError> {
        if matches!(self, Self::Last { .. } | Self::Between) {
            return Ok(());
        }
        for index in 0..batch.entries().len() {
            let entry = batch.entries()[index].clone();
            let known = |sequences: &Sequences| {
                sequences.get(entry.sequence).is_some_and(|s| s.tokens.len() >= entry.positions.end)
            };
            while !known(sequences) && self.receive(device, sequences)? {}
            let sequence = sequences.get(entry.sequence);
            let known = sequence.and_then(|s| s.tokens.get(entry.positions.clone()));
            let chosen = || {
                let last = sequence.filter(|s| entry.positions == (s.tokens.len()..s.len))?;
                in_flight?.row_of(entry.sequence, last, index)
            };
            match (known, known.is_none().then(chosen).flatten()) {
                (Some(tokens), _) => batch.push_tokens(tokens),
                (None, Some(row)) => batch.push_tokens(&[CHOSEN + row as u32]),
                (None, None) => {
                    return Err(CollectiveError::Mismatch {
                        operation: "token return",
                        detail: format!("no token came back for sequence {}", entry.sequence),
                    });
                }
            }
        }
        Ok(())
    }

    /// Last stage: keeps the sampled tokens and sends them to the first stage.
    pub fn publish<D: Device>(
        &mut self,
        device: &mut D,
        sampled: &[(u64, Option<u32>)],
        sequences: &mut Sequences,
    ) -> Result<(), CollectiveError> {
        for (id, token) in sampled {
            if let Some(sequence) = sequences.get_mut(*id) {
                sequence.tokens.push(token.unwrap_or(0));
            }
        }
        match self {
            Self::Last { to } if !sampled.is_empty() => {
                let tokens: Vec<u32> =
                    sampled.iter().map(|(_, token)| token.unwrap_or(NO_TOKEN)).collect();
                device.send_tokens(*to, &tokens)
            }
            _ => Ok(()),
        }
    }
}
