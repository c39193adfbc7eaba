//! A step as the engine takes it: what one Prefill or Decode asks for, parsed once.

use trireme_proto::shard::v1 as proto;

use crate::sampler::{Sampling, Scoring};

/// One ordered step of an epoch.
#[derive(Clone, Debug, Default)]
pub struct Step {
    pub epoch: u64,
    pub id: u64,
    pub drop: Vec<u64>,
    pub blocks: Vec<BlockUpdate>,
    pub new: Vec<NewSequence>,
    pub chunks: Vec<Chunk>,
    pub decode: Vec<u64>,
}

/// Blocks appended to one sequence's table.
#[derive(Clone, Debug)]
pub struct BlockUpdate {
    pub sequence: u64,
    pub append: Vec<u32>,
}

#[derive(Clone, Debug)]
pub struct NewSequence {
    pub id: u64,
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    /// Why the sampling parameters cannot be used, where they cannot: an error of this sequence alone.
    pub sampling: Result<Sampling, String>,
    /// Prompt tokens to be scored; those that cannot be are such an error too.
    pub scoring: Result<Option<Scoring>, String>,
}

/// Computes `tokens[start .. start + len]`.
#[derive(Clone, Copy, Debug)]
pub struct Chunk {
    pub sequence: u64,
    pub start: usize,
    pub len: usize,
    pub sample: bool,
}

/// The request has no header.
#[derive(Debug, thiserror::Error)]
#[error("header: required, but missing")]
pub struct MissingHeader;

impl Step {
    fn from_header(header: Option<proto::StepHeader>) -> Result<Self, MissingHeader> {
        let header = header.ok_or(MissingHeader)?;
        let blocks = header
            .blocks
            .into_iter()
            .map(|update| BlockUpdate { sequence: update.sequence, append: update.append })
            .collect();
        Ok(Self {
            epoch: header.epoch,
            id: header.step_id,
            drop: header.drop,
            blocks,
            ..Self::default()
        })
    }

    /// Tokens this step computes, if every part of it is good.
    pub fn tokens(&self) -> usize {
        let chunks = self.chunks.iter().fold(0usize, |sum, chunk| sum.saturating_add(chunk.len));
        chunks.saturating_add(self.decode.len())
    }

    /// Sequences this step computes.
    pub fn sequences(&self) -> usize {
        self.chunks.len() + self.decode.len()
    }
}

impl TryFrom<proto::DecodeRequest> for Step {
    type Error = MissingHeader;
    fn try_from(request: proto::DecodeRequest) -> Result<Self, MissingHeader> {
        Ok(Self { decode: request.decode, ..Self::from_header(request.header)? })
    }
}

impl TryFrom<proto::PrefillRequest> for Step {
    type Error = MissingHeader;
    fn try_from(request: proto::PrefillRequest) -> Result<Self, MissingHeader> {
        let header = Self::from_header(request.header)?;
        let new = request.new.into_iter().map(NewSequence::from).collect();
        let chunks = request.chunks.iter().map(Chunk::from).collect();
        Ok(Self { new, chunks, decode: request.decode, ..header })
    }
}

impl From<proto::Sequence> for NewSequence {
    fn from(sequence: proto::Sequence) -> Self {
        let scoring = sequence.scoring.as_ref().map(Scoring::try_from).transpose();
        Self {
            id: sequence.id,
            tokens: sequence.tokens,
            prompt_len: sequence.prompt_len as usize,
            sampling: Sampling::try_from(&sequence.sampling.unwrap_or_default())
                .map_err(|error| error.to_string()),
            scoring: scoring.map_err(|error| error.to_string()),
        }
    }
}

impl From<&proto::Chunk> for Chunk {
    fn from(chunk: &proto::Chunk) -> Self {
        Self {
            sequence: chunk.sequence,
            start: chunk.start as usize,
            len: chunk.len as usize,
            sample: chunk.sample,
        }
    }
}
