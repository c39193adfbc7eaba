//! How far a download is: a bar on a terminal, a line now and then elsewhere.

use std::{
    io::{IsTerminal, Write, stderr},
    time::Duration,
};

use indicatif::{ProgressBar, ProgressStyle};

use crate::size;

pub struct Progress {
    name: String,
    terminal: bool,
    bar: Option<ProgressBar>,
    total: u64,
    /// Tenths of the total that were told.
    told: u64,
}

impl Progress {
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            terminal: stderr().is_terminal(),
            bar: None,
            total: 0,
            told: 0,
        }
    }

    /// One line for a person.
    pub fn note(&mut self, text: &str) {
        self.end();
        let _ = writeln!(stderr(), "trireme: {}: {text}", self.name);
        if self.terminal {
            // Until bytes are seen, a spinner shows that something is going on.
            let spinner = ProgressBar::new_spinner();
            spinner.enable_steady_tick(Duration::from_millis(100));
            self.bar = Some(spinner);
        }
    }

    pub fn start(&mut self, total: u64) {
        self.end();
        self.total = total;
        self.told = 0;
        if self.terminal {
            let style = "{prefix} {bar:30} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
            let bar = ProgressBar::new(total).with_prefix(self.name.clone());
            bar.set_style(
                ProgressStyle::with_template(style)
                    .unwrap_or_else(|_| ProgressStyle::default_bar()),
            );
            self.bar = Some(bar);
        }
    }

    pub fn at(&mut self, bytes: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(bytes);
            return;
        }
        let tenths = bytes * 10 / self.total.max(1);
        if tenths > self.told {
            self.told = tenths;
            let (now, total) = (size::display(bytes), size::display(self.total));
            let _ = writeln!(stderr(), "trireme: {}: {now} of {total}", self.name);
        }
    }

    pub fn done(&mut self) {
        self.end();
        let total = size::display(self.total);
        let _ = writeln!(stderr(), "trireme: {}: {total}, SHA-256 is right", self.name);
    }

    fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.end();
    }
}
