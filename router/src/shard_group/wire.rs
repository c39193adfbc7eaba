//! The scheduler's plan in the words of `shard.v1`.

use trireme_grammar::{Grammar, Kind, Vocabulary};
use trireme_proto::shard::v1 as proto;
use trireme_scheduler::{Plan, SequenceId};

use crate::validation::Sampling;

/// What the shards must know of a sequence beside its tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SequenceParameters {
    pub sampling: proto::Sampling,
    /// The likeliest tokens to report beside each prompt token that is scored.
    pub prompt_top_logprobs: u32,
}

/// A step as it goes over the wire: `Decode` when nothing is prefilled.
#[derive(Clone, Debug, PartialEq)]
pub enum StepRequest {
    Prefill(proto::PrefillRequest),
    Decode(proto::DecodeRequest),
}

impl StepRequest {
    /// `parameters` are asked for every sequence that the plan admits.
    pub fn new(
        epoch: u64,
        plan: Plan,
        mut parameters: impl FnMut(SequenceId) -> SequenceParameters,
    ) -> Self {
        let blocks = plan.blocks.into_iter();
        let header = proto::StepHeader {
            epoch,
            step_id: plan.step_id,
            drop: plan.drop,
            blocks: blocks
                .map(|(sequence, append)| proto::BlockUpdate { sequence, append })
                .collect(),
        };
        let header = Some(header);
        if plan.admit.is_empty() && plan.chunks.is_empty() {
            return Self::Decode(proto::DecodeRequest { header, decode: plan.decode });
        }
        let admit = plan.admit.into_iter().map(|admit| {
            let SequenceParameters { sampling, prompt_top_logprobs: top_logprobs } =
                parameters(admit.id);
            let scoring = |start: usize| proto::Scoring { start: start as u32, top_logprobs };
            proto::Sequence {
                id: admit.id,
                tokens: admit.tokens,
                prompt_len: admit.prompt_len as u32,
                sampling: Some(sampling),
                scoring: admit.score_from.map(scoring),
            }
        });
        let chunks = plan.chunks.into_iter().map(|chunk| proto::Chunk {
            sequence: chunk.id,
            start: chunk.start as u32,
            len: chunk.len as u32,
            sample: chunk.sample,
        });
        Self::Prefill(proto::PrefillRequest {
            header,
            new: admit.collect(),
            chunks: chunks.collect(),
            decode: plan.decode,
        })
    }
}

/// A request's checked sampling in the shards' words.
pub fn sampling(
    of: &Sampling,
    min_tokens: u32,
    stop_token_ids: &[u32],
    grammar: Option<&Grammar>,
) -> proto::Sampling {
    let bias = |(&token, &bias): (&u32, &f32)| proto::LogitBias { token, bias };
    proto::Sampling {
        temperature: of.temperature,
        top_k: of.top_k,
        top_p: of.top_p,
        min_p: of.min_p,
        typical_p: of.typical_p,
        repetition_penalty: of.repetition_penalty,
        frequency_penalty: of.frequency_penalty,
        presence_penalty: of.presence_penalty,
        logit_bias: of.logit_bias.iter().map(bias).collect(),
        seed: of.seed,
        logprobs: of.logprobs,
        top_logprobs: of.top_logprobs,
        min_tokens,
        stop_token_ids: stop_token_ids.to_vec(),
        grammar: grammar.map(self::grammar),
    }
}

pub fn grammar(of: &Grammar) -> proto::Grammar {
    let kind = match of.kind {
        Kind::JsonSchema => proto::GrammarKind::JsonSchema,
        Kind::Regex => proto::GrammarKind::Regex,
        Kind::Lark => proto::GrammarKind::Lark,
    };
    proto::Grammar { kind: kind.into(), text: of.text.clone() }
}

pub fn vocabulary(of: &Vocabulary) -> proto::Vocabulary {
    proto::Vocabulary {
        words: of.words.concat(),
        lengths: of.words.iter().map(|word| word.len() as u32).collect(),
        end_of_sequence: of.end_of_sequence.clone(),
    }
}
