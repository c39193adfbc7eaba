//! How far a shard's loading is: a bar on a terminal, a line now and then elsewhere.

use std::{
    io::{IsTerminal, stderr},
    sync::LazyLock,
    time::{Duration, Instant},
};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use crate::{size, topology::Role};

/// Between two lines, where there is no terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

/// The bars of all shards share the foot of the terminal.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

pub struct LoadProgress {
    role: Role,
    bar: Option<ProgressBar>,
    told: Option<Instant>,
}

impl LoadProgress {
    pub fn new(role: Role) -> Self {
        Self { role, bar: None, told: None }
    }

    /// `loaded` of `total` bytes of weights are there.
    pub fn at(&mut self, loaded: u64, total: u64) {
        if stderr().is_terminal() {
            let role = self.role;
            let bar = self.bar.get_or_insert_with(|| BARS.add(bar(role, total)));
            bar.set_length(total);
            bar.set_position(loaded);
        } else if self.told.is_none_or(|then| then.elapsed() >= LINE_INTERVAL) {
            self.told = Some(Instant::now());
            let (loaded, total) = (size::display(loaded), size::display(total));
            tracing::info!(process = %self.role, %loaded, %total, "loading weights");
        }
    }

    /// Takes the bar away.
    pub fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
            BARS.remove(&bar);
        }
    }
}

impl Drop for LoadProgress {
    fn drop(&mut self) {
        self.end();
    }
}

fn bar(role: Role, total: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{prefix:8} loading {bar:30} {bytes}/{total_bytes}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(total).with_prefix(role.to_string()).with_style(style)
}
