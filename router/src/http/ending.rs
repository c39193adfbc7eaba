//! How a choice ended, in OpenAI's words and vLLM's `stop_reason`.

use schemars::JsonSchema;
use serde::Serialize;

use crate::api::{FinishReason, Finished, StopCause};

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Ending {
    pub finish_reason: Option<&'static str>,
    /// The stop string or stop id that ended it; null for an end of sequence or a length.
    pub stop_reason: Option<StopReason>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum StopReason {
    Id(u32),
    Text(String),
}

impl Ending {
    /// A chat's answer that calls ends with `tool_calls`, unless it was cut.
    pub fn of_chat(finished: &Finished, has_calls: bool) -> Self {
        let mut ending = Self::of(finished);
        if has_calls && finished.reason == FinishReason::Stop {
            ending.finish_reason = Some("tool_calls");
        }
        ending
    }

    pub fn of(finished: &Finished) -> Self {
        let finish_reason = Some(match finished.reason {
            FinishReason::Length => "length",
            FinishReason::Stop => "stop",
        });
        let stop_reason = match &finished.stop {
            Some(StopCause::TokenId(id)) => Some(StopReason::Id(*id)),
            Some(StopCause::Text(text)) => Some(StopReason::Text(text.clone())),
            Some(StopCause::EndOfSequence(_)) | None => None,
        };
        Self { finish_reason, stop_reason }
    }
}
