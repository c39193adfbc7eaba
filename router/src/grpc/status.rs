//! Errors as gRPC statuses.

use tonic::{Code, Status};

use crate::error::RouterError;

impl From<RouterError> for Status {
    fn from(error: RouterError) -> Self {
        let code = match &error {
            RouterError::Invalid { .. } => Code::InvalidArgument,
            RouterError::Unauthorized => Code::Unauthenticated,
            RouterError::ModelNotFound { .. } => Code::NotFound,
            RouterError::Unsupported { .. } => Code::Unimplemented,
            RouterError::Overloaded { .. } | RouterError::SlowReader { .. } => {
                Code::ResourceExhausted
            }
            RouterError::NotReady(_) | RouterError::ShardLost | RouterError::ShuttingDown => {
                Code::Unavailable
            }
            RouterError::Sequence(_) => Code::Aborted,
            RouterError::Internal(cause) => {
                tracing::error!(error = format!("{cause:#}"), "internal error");
                Code::Internal
            }
        };
        Self::new(code, error.to_string())
    }
}
