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
    /// Bytes of the total that are behind the part in hand.
    base: u64,
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
            base: 0,
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

    /// One line for a person, amid the bytes.
    pub fn say(&self, text: &str) {
        let line = || drop(writeln!(stderr(), "trireme: {}: {text}", self.name));
        match &self.bar {
            Some(bar) => bar.suspend(line),
            None => line(),
        }
    }

    pub fn start(&mut self, total: u64) {
        self.end();
        self.total = total;
        self.base = 0;
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

    /// What follows is the part of the total that begins here.
    pub fn part(&mut self, base: u64) {
        self.base = base;
    }

    /// So many bytes of the part in hand are here.
    pub fn at(&mut self, bytes: u64) {
        let bytes = self.base + bytes;
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
        self.say(&format!("{}, SHA-256 is right", size::display(self.total)));
    }

    pub fn end(&mut self) {
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
