//! One row on its way from logits to a token.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use trireme_kernels::Team;

use super::peak::{LocalPeak, Peak};
use super::race::Winner;
use super::selection::Search;
use super::typical::Typical;
use super::weight::Scale;
use super::{SampleError, SampleRow, Sampled, edits};

pub(super) struct Row<'a> {
    pub(super) request: &'a SampleRow<'a>,
    /// This rank's slice; raw at first, then with the edits applied.
    pub(super) logits: &'a mut [f32],
    /// The token of `logits[0]`.
    pub(super) first: u32,
    /// Edited tokens with the values they had, in the order of the edits.
    edited: Vec<(u32, f32)>,
    pub(super) local: LocalPeak,
    /// Equal on all ranks, once found.
    pub(super) peak: Result<Peak, SampleError>,
    pub(super) search: Search,
    pub(super) typical: Typical,
    /// This rank's winner of the draw.
    pub(super) winner: Winner,
    /// What the draw chose, with its raw logit.
    pub(super) drawn: Option<(u32, f32)>,
}

impl<'a> Row<'a> {
    pub(super) fn new(request: &'a SampleRow<'a>, logits: &'a mut [f32], first: u32) -> Self {
        Self {
            request,
            logits,
            first,
            edited: Vec::new(),
            local: LocalPeak::default(),
            peak: Err(SampleError::NothingPossible),
            search: Search::default(),
            typical: Typical::default(),
            winner: Winner::default(),
            drawn: None,
        }
    }

    /// Applies penalties, bias and masks.
    pub(super) fn edit(&mut self) {
        edits::apply(self.request, self.logits, self.first, &mut self.edited);
    }

    /// The logit that the model computed for one of this rank's tokens.
    pub(super) fn raw(&self, token: u32) -> f32 {
        let edited = self.edited.iter().find(|(edited, _)| *edited == token);
        edited.map_or_else(|| self.logits[(token - self.first) as usize], |&(_, raw)| raw)
    }

    /// How logits become distances, if this row takes part in the draw.
    pub(super) fn scale(&self) -> Option<Scale> {
        let peak = self.peak.as_ref().ok()?;
        let temperature = self.request.sampling.temperature?;
        Some(Scale::new(peak.max, temperature))
    }

    pub(super) fn finish(self) -> Result<Sampled, SampleError> {
        let peak = self.peak?;
        let (token, raw) = self.drawn.unwrap_or((peak.token, peak.raw));
        let wanted = self.request.sampling.logprobs;
        let logprob = if wanted { peak.normaliser.logprob(raw) } else { 0.0 };
        let top = peak.top.iter().map(|&(token, raw)| (token, peak.normaliser.logprob(raw)));
        Ok(Sampled { token, logprob, top: top.collect() })
    }
}

/// Runs `work` once on every row that is `included`, rows spread over the team.
pub(super) fn each_row<'a>(
    rows: &mut [Row<'a>],
    team: &Team,
    included: impl Fn(&Row<'a>) -> bool,
    work: impl Fn(&mut Row<'a>) + Sync,
) {
    each(rows.iter_mut().filter(|row| included(row)).collect(), team, work);
}

/// Runs `work` once on every item, items spread over the team.
pub(super) fn each<T: Send>(mut items: Vec<&mut T>, team: &Team, work: impl Fn(&mut T) + Sync) {
    if let [item] = &mut items[..] {
        return work(item);
    }
    if items.is_empty() {
        return;
    }
    let next = AtomicUsize::new(0);
    // Each lock is taken once, by whoever drew the number: it only proves that items are not shared.
    let items: Vec<Mutex<&mut T>> = items.into_iter().map(Mutex::new).collect();
    team.run(&|_| {
        while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
            work(&mut item.lock().unwrap_or_else(PoisonError::into_inner));
        }
    });
}
