//! The caller's deadline, `grpc-timeout`.

use std::time::Duration;

use tokio::time::{Instant, timeout_at};
use tonic::{Status, metadata::MetadataMap};

/// tonic's own timer ends a call at the deadline with CANCELLED, which a caller takes for its own
/// doing. The answer with the right code must come before it.
const LEAD: Duration = Duration::from_millis(5);
/// Digits of a timeout at most (gRPC over HTTP/2, "Timeout").
const DIGITS_MOST: usize = 8;

/// When an answer is of no use any more; `None`: never.
#[derive(Clone, Copy, Debug)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    /// Counted from now. What is no timeout is none, as with tonic.
    pub fn of(metadata: &MetadataMap) -> Self {
        let given = metadata.get("grpc-timeout").and_then(|value| value.to_str().ok());
        let limit = given.and_then(parse);
        Self(limit.and_then(|limit| Instant::now().checked_add(limit.saturating_sub(LEAD))))
    }

    /// Waits for `work` until the deadline, which drops it.
    pub async fn cut<T>(self, work: impl Future<Output = T>) -> Result<T, Status> {
        match self.0 {
            None => Ok(work.await),
            Some(at) => timeout_at(at, work).await.map_err(|_| {
                Status::deadline_exceeded("the answer did not end within the caller's deadline")
            }),
        }
    }
}

fn parse(given: &str) -> Option<Duration> {
    let (digits, unit) = given.split_at_checked(given.len().checked_sub(1)?)?;
    if digits.len() > DIGITS_MOST || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let count: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(count * 3600),
        "M" => Duration::from_secs(count * 60),
        "S" => Duration::from_secs(count),
        "m" => Duration::from_millis(count),
        "u" => Duration::from_micros(count),
        "n" => Duration::from_nanos(count),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_read_as_the_protocol_writes_them() {
        for (given, expected_ms) in [
            ("2H", Some(7_200_000)),
            ("3M", Some(180_000)),
            ("4S", Some(4000)),
            ("50m", Some(50)),
            ("6000u", Some(6)),
            ("99999999n", Some(99)),
            ("123456789m", None),
            ("5", None),
            ("+5S", None),
            ("S", None),
            ("", None),
            ("5ß", None),
        ] {
            assert_eq!(parse(given).map(|limit| limit.as_millis()), expected_ms, "{given:?}");
        }
    }
}
