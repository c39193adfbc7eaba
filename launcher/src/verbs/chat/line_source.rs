//! Lines that a person types, or that a pipe holds.

use std::{
    io::{BufRead, stdin},
    thread,
};

use reedline::{DefaultPrompt, DefaultPromptSegment, Reedline, Signal};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use tokio::sync::mpsc;

#[derive(Debug)]
pub enum Input {
    Line(String),
    /// Ctrl-C at the prompt.
    Cancelled,
    End,
    Failed(String),
}

/// Reads on a thread of its own, one line each time it is asked: while an answer comes the terminal
/// is not in raw mode, so that Ctrl-C is a signal then.
pub struct LineSource {
    asks: mpsc::Sender<()>,
    lines: mpsc::Receiver<Input>,
    terminal: Option<Termios>,
}

impl LineSource {
    pub fn start(terminal: bool) -> std::io::Result<Self> {
        let (asks, mut asked) = mpsc::channel::<()>(1);
        let (sender, lines) = mpsc::channel(1);
        let saved = terminal.then(|| tcgetattr(stdin()).ok()).flatten();
        thread::Builder::new().name("line-source".into()).spawn(move || {
            let mut read = reader(terminal);
            while asked.blocking_recv().is_some() {
                if sender.blocking_send(read()).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { asks, lines, terminal: saved })
    }

    pub async fn next(&mut self) -> Input {
        match self.asks.send(()).await {
            Ok(()) => self.lines.recv().await.unwrap_or(Input::End),
            Err(_) => Input::End,
        }
    }
}

impl Drop for LineSource {
    fn drop(&mut self) {
        // The thread may still be at its prompt (the engine died): a shell must get its terminal
        // back as it was.
        if let Some(saved) = &self.terminal {
            let _ = tcsetattr(stdin(), OptionalActions::Now, saved);
        }
    }
}

fn reader(terminal: bool) -> Box<dyn FnMut() -> Input> {
    if !terminal {
        let mut lines = stdin().lock().lines();
        return Box::new(move || match lines.next() {
            Some(Ok(line)) => Input::Line(line),
            Some(Err(error)) => Input::Failed(error.to_string()),
            None => Input::End,
        });
    }
    let mut editor = Reedline::create();
    let name = DefaultPromptSegment::Basic("you".to_owned());
    let prompt = DefaultPrompt::new(name, DefaultPromptSegment::Empty);
    Box::new(move || match editor.read_line(&prompt) {
        Ok(Signal::Success(line)) => Input::Line(line),
        Ok(Signal::CtrlC) => Input::Cancelled,
        Ok(_) => Input::End,
        Err(error) => Input::Failed(error.to_string()),
    })
}
