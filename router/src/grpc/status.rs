//! Errors as gRPC statuses, with the details of `google.rpc` (AIP-193): programs read the reason and
//! the field, people the message.

use std::{collections::HashMap, time::Duration};

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use crate::error::RouterError;

/// Who says the reason.
const DOMAIN: &str = "trireme";

impl From<RouterError> for Status {
    fn from(error: RouterError) -> Self {
        let (code, reason) = match &error {
            RouterError::Invalid { .. } => (Code::InvalidArgument, "INVALID_VALUE"),
            RouterError::Unauthorized => (Code::Unauthenticated, "INVALID_API_KEY"),
            RouterError::ModelNotFound { .. } => (Code::NotFound, "MODEL_NOT_FOUND"),
            RouterError::Unsupported { .. } => (Code::Unimplemented, "UNSUPPORTED_FIELD"),
            RouterError::Overloaded { .. } => (Code::ResourceExhausted, "QUEUE_FULL"),
            RouterError::SlowReader { .. } => (Code::ResourceExhausted, "SLOW_READER"),
            RouterError::NotReady(_) => (Code::Unavailable, "NOT_READY"),
            RouterError::ShardLost => (Code::Unavailable, "SHARD_LOST"),
            RouterError::ShuttingDown => (Code::Unavailable, "SHUTTING_DOWN"),
            RouterError::Sequence(_) => (Code::Aborted, "SEQUENCE_FAILED"),
            RouterError::Internal(cause) => {
                tracing::error!(error = format!("{cause:#}"), "internal error");
                (Code::Internal, "INTERNAL_ERROR")
            }
        };
        let message = error.to_string();
        let mut details = ErrorDetails::with_error_info(reason, DOMAIN, HashMap::new());
        match &error {
            RouterError::Invalid { field, .. } | RouterError::Unsupported { field, .. } => {
                details.add_bad_request_violation(*field, &message);
            }
            RouterError::Overloaded { retry_after_s, .. } => {
                details.set_retry_info(Some(Duration::from_secs(*retry_after_s)));
            }
            _ => {}
        }
        Self::with_error_details(code, message, details)
    }
}
