//! Percentiles and rates from the times of tokens.

use std::time::Duration;

/// The value that `percent` of all values do not exceed (nearest rank); 0 without values.
pub fn percentile(values: &[f64], percent: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (percent / 100.0 * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied().unwrap_or(0.0)
}

pub fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// Times between neighbouring tokens of each sequence, in milliseconds.
pub fn gaps_ms(sequences: &[Vec<Duration>]) -> Vec<f64> {
    let gaps = |times: &Vec<Duration>| {
        times.windows(2).map(|pair| ms(pair[1] - pair[0])).collect::<Vec<_>>()
    };
    sequences.iter().flat_map(gaps).collect()
}

/// Tokens a second while all sequences were decoding: after the last one's first token, up to the
/// first one's last token. Nothing when they were never all decoding.
pub fn steady_tokens_per_s(sequences: &[Vec<Duration>]) -> Option<f64> {
    let start = sequences.iter().map(|times| times.first()).max()??;
    let end = sequences.iter().map(|times| times.last()).min()??;
    let span_s = end.checked_sub(*start)?.as_secs_f64();
    let inside = sequences.iter().flatten().filter(|time| *time > start && *time <= end).count();
    (span_s > 0.0).then(|| inside as f64 / span_s)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(ms: &[u64]) -> Vec<Duration> {
        ms.iter().map(|ms| Duration::from_millis(*ms)).collect()
    }

    #[test]
    fn percentiles_are_by_nearest_rank() {
        let check = |values: &[f64], percent: f64, want: f64| {
            assert_eq!(percentile(values, percent), want, "{values:?} {percent}");
        };
        check(&[], 50.0, 0.0);
        check(&[3.0], 50.0, 3.0);
        check(&[4.0, 1.0, 3.0, 2.0], 50.0, 2.0);
        check(&[4.0, 1.0, 3.0, 2.0], 99.0, 4.0);
        check(&[4.0, 1.0, 3.0, 2.0], 0.0, 1.0);
    }

    #[test]
    fn gaps_are_within_a_sequence() {
        let sequences = [times(&[10, 15, 25]), times(&[100]), times(&[])];
        assert_eq!(gaps_ms(&sequences), [5.0, 10.0]);
    }

    #[test]
    fn the_steady_rate_counts_only_full_batches() {
        let check = |sequences: &[Vec<Duration>], want: Option<f64>| {
            assert_eq!(steady_tokens_per_s(sequences), want, "{sequences:?}");
        };
        check(&[], None);
        check(&[times(&[])], None);
        check(&[times(&[10])], None);
        check(&[times(&[0, 10, 20])], Some(100.0));
        // Both decode from 10 to 30: 20, 30 of the one, 20, 30 of the other.
        check(&[times(&[0, 10, 20, 30]), times(&[10, 20, 30, 40])], Some(200.0));
        check(&[times(&[0, 10]), times(&[20, 30])], None);
    }
}
