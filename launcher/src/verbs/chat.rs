//! `chat`: a conversation in the terminal, or over a pipe.

mod command;
mod conversation;
mod line_source;

use std::{
    io::{IsTerminal, Write, stderr, stdin, stdout},
    path::Path,
};

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};
use trireme_proto::generate::v1::{GenerateRequest, Messages, generate_request::Prompt};

use self::{
    command::{Command, HELP},
    conversation::Conversation,
    line_source::{Input, LineSource},
};
use super::session::{self, Interrupt, with_server};
use crate::{
    answer::{Incoming, Print, parameters},
    cli::ChatArgs,
    rpc::Connection,
};

pub fn chat(args: &ChatArgs) -> anyhow::Result<()> {
    let engine = session::engine(&args.engine);
    let terminal = stdin().is_terminal() && stdout().is_terminal();
    let interrupt = if terminal { Interrupt::IsTheVerbs } else { Interrupt::Ends };
    with_server(&args.engine, &engine, &args.connect, interrupt, async |channel| {
        let lines = LineSource::start(terminal)?;
        if terminal {
            note("Ctrl-C stops an answer, /help lists the commands, /exit ends.")?;
        }
        let conversation = Conversation::new(args.system.clone());
        Talk { args, channel, lines, conversation, terminal }.run().await
    })
}

/// What is said beside the answers goes to standard error: a pipe gets answers alone.
fn note(text: &str) -> std::io::Result<()> {
    writeln!(stderr(), "{text}")
}

/// The reader of standard output has gone: no later answer would reach it either.
fn nobody_reads(error: &anyhow::Error) -> bool {
    let causes = error.chain().filter_map(|cause| cause.downcast_ref::<std::io::Error>());
    causes.into_iter().any(|cause| cause.kind() == std::io::ErrorKind::BrokenPipe)
}

struct Talk<'a> {
    args: &'a ChatArgs,
    channel: Connection,
    lines: LineSource,
    conversation: Conversation,
    terminal: bool,
}

impl Talk<'_> {
    async fn run(mut self) -> anyhow::Result<()> {
        loop {
            let line = match self.lines.next().await {
                Input::Line(line) => line,
                Input::Cancelled => continue,
                Input::End => return Ok(()),
                Input::Failed(reason) => anyhow::bail!("read a line: {reason}"),
            };
            match Command::parse(&line) {
                Command::Nothing => {}
                Command::Exit => return Ok(()),
                Command::Help => note(HELP)?,
                Command::Reset => {
                    self.conversation.reset();
                    note("a new conversation")?;
                }
                Command::System(text) => {
                    self.conversation.set_system(text);
                    note("a new conversation, with this system message")?;
                }
                Command::Save(file) => match self.save(Path::new(&file)) {
                    Ok(()) => note(&format!("saved to {file}"))?,
                    Err(error) => note(&format!("/save: {error:#}"))?,
                },
                Command::Wrong(reason) => note(&reason)?,
                Command::Say(text) => self.say(text).await?,
            }
        }
    }

    fn save(&self, file: &Path) -> anyhow::Result<()> {
        std::fs::write(file, self.conversation.json()).with_context(|| file.display().to_string())
    }

    /// One turn. A refusal (too long, say) is told and forgotten; the conversation goes on without it.
    async fn say(&mut self, text: String) -> anyhow::Result<()> {
        self.conversation.ask(text);
        let messages = self.conversation.messages().to_vec();
        let request = GenerateRequest {
            prompt: Some(Prompt::Messages(Messages { messages })),
            parameters: Some(parameters(&self.args.sampling, self.args.engine.seed)),
            ..Default::default()
        };
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut out = stdout();
        let mut incoming = Incoming::new(&mut out, Print::Text);
        let outcome = tokio::select! {
            outcome = incoming.receive(self.channel.clone(), request) => Some(outcome),
            // Dropping the stream cancels the request.
            _ = interrupt.recv() => None,
        };
        let answer = std::mem::take(&mut incoming.answer);
        match outcome {
            Some(Ok(())) => {
                if self.terminal {
                    note(&format!("[{}]", answer.summary()))?;
                }
                self.conversation.answer(answer.text);
            }
            Some(Err(error)) if nobody_reads(&error) => return Err(error),
            Some(Err(error)) => {
                note(&format!("{error:#}"))?;
                self.conversation.take_back();
            }
            None => {
                writeln!(out)?;
                note("[stopped]")?;
                self.conversation.answer(answer.text);
            }
        }
        Ok(())
    }
}
