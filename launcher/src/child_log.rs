//! Lines that child processes write, taken whole and merged into one log.

use std::{
    io::{self, Write},
    thread,
};

use serde_json::{Map, Value};
use tokio::{
    io::{AsyncRead, AsyncReadExt},
    sync::mpsc,
};

use crate::{config::LogFormat, topology::Role};

/// A longer line is written in pieces of this size: a child must not fill our memory.
const LINE_BYTES_MAX: usize = 1 << 20;
/// Lines on their way to the log; when it is full, children wait.
const LINES_MAX: usize = 1024;

/// One line of a child, without its end.
struct Line {
    role: Role,
    bytes: Vec<u8>,
}

/// Where readers put lines. The log ends when every clone is gone.
#[derive(Clone, Debug)]
pub struct ChildLog(mpsc::Sender<Line>);

impl ChildLog {
    /// A log that a thread of its own writes to `out`, so that a slow terminal holds up no one else.
    pub fn start(
        format: LogFormat,
        mut out: impl Write + Send + 'static,
    ) -> io::Result<(Self, thread::JoinHandle<()>)> {
        let (sender, mut lines) = mpsc::channel::<Line>(LINES_MAX);
        let writer = thread::Builder::new().name("child-log".into()).spawn(move || {
            while let Some(line) = lines.blocking_recv() {
                // One write a line, so that lines of others do not cut it.
                let _ = out.write_all(&render(format, line.role, &line.bytes));
                let _ = out.flush();
            }
        })?;
        Ok((Self(sender), writer))
    }

    /// Reads a child's pipe to its end.
    pub async fn copy(self, role: Role, mut pipe: impl AsyncRead + Unpin) {
        let mut held = Vec::new();
        let mut buffer = vec![0; 64 << 10];
        loop {
            let read = match pipe.read(&mut buffer).await {
                Ok(0) | Err(_) => break,
                Ok(read) => &buffer[..read],
            };
            for piece in read.split_inclusive(|byte| *byte == b'\n') {
                held.extend_from_slice(piece);
                if piece.ends_with(b"\n") {
                    held.pop();
                    self.put(role, std::mem::take(&mut held)).await;
                } else if held.len() >= LINE_BYTES_MAX {
                    self.put(role, std::mem::take(&mut held)).await;
                }
            }
        }
        if !held.is_empty() {
            self.put(role, held).await; // died in the middle of a line
        }
    }

    async fn put(&self, role: Role, mut bytes: Vec<u8>) {
        if bytes.last() == Some(&b'\r') {
            bytes.pop();
        }
        if !bytes.is_empty() {
            let _ = self.0.send(Line { role, bytes }).await;
        }
    }
}

/// A line in the chosen format, its end included.
fn render(format: LogFormat, role: Role, bytes: &[u8]) -> Vec<u8> {
    let event = serde_json::from_slice::<Map<String, Value>>(bytes).ok();
    let event = event.filter(|event| event.contains_key("level"));
    let mut line = match (format, event) {
        (LogFormat::Text, Some(event)) => text(role, event).into_bytes(),
        (LogFormat::Text, None) => [format!("{role}: ").as_bytes(), bytes].concat(),
        (LogFormat::Json, Some(event)) => json(role, event),
        (LogFormat::Json, None) => {
            let mut event = Map::new();
            event.insert("message".to_owned(), escaped(bytes).into());
            json(role, event)
        }
    };
    line.push(b'\n');
    line
}

fn json(role: Role, mut event: Map<String, Value>) -> Vec<u8> {
    match role {
        Role::Shard { rank } => {
            event.insert("process".to_owned(), "shard".into());
            event.insert("rank".to_owned(), rank.into());
        }
        Role::Router => drop(event.insert("process".to_owned(), "router".into())),
    }
    Value::Object(event).to_string().into_bytes()
}

/// As `tracing` writes a line: time, level, process, target, message, fields.
fn text(role: Role, mut event: Map<String, Value>) -> String {
    let mut take = |key: &str| match event.shift_remove(key) {
        Some(Value::String(text)) => text,
        Some(other) => other.to_string(),
        None => String::new(),
    };
    let (timestamp, level) = (take("timestamp"), take("level"));
    let (target, message) = (take("target"), take("message"));
    let process = match role {
        Role::Shard { rank } => format!("shard{{rank={rank}}}"),
        Role::Router => "router".to_owned(),
    };
    let mut line = format!("{timestamp} {level:>5} {process}: {target}: {message}");
    for (key, value) in event {
        line.push_str(&format!(" {key}={value}"));
    }
    // A message may hold line ends (a backtrace); in text they stay, as in any log for people.
    line
}

/// Text with bytes that are not UTF-8 written as `\xNN`.
fn escaped(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        for byte in chunk.invalid() {
            text.push_str(&format!("\\x{byte:02x}"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Page(Arc<Mutex<Vec<u8>>>);
    impl Write for Page {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn lines_survive() {
        let check = async |format: LogFormat, role: Role, written: &[u8], want: &[u8]| {
            let page = Page::default();
            let (log, writer) = ChildLog::start(format, page.clone()).unwrap();
            log.copy(role, written).await;
            writer.join().unwrap();
            let got = page.0.lock().unwrap().clone();
            let show =
                |bytes: &[u8]| String::from_utf8_lossy(&bytes[..bytes.len().min(300)]).into_owned();
            assert!(got == want, "got {}, want {}", show(&got), show(want));
        };
        let (text, json, shard) = (LogFormat::Text, LogFormat::Json, Role::Shard { rank: 1 });
        check(text, shard, b"plain\n", b"shard 1: plain\n").await;
        check(text, shard, b"cut in the mid", b"shard 1: cut in the mid\n").await;
        check(text, shard, b"a\r\n\nb\n", b"shard 1: a\nshard 1: b\n").await;
        check(text, Role::Router, b"\xff\xfe{\n", b"router: \xff\xfe{\n").await;
        check(
            json,
            shard,
            b"\xff\"\n",
            b"{\"message\":\"\\\\xff\\\"\",\"process\":\"shard\",\"rank\":1}\n",
        )
        .await;
        let event = b"{\"timestamp\":\"T\",\"level\":\"WARN\",\"message\":\"slow\",\"ms\":7,\"target\":\"t\"}\n";
        check(text, shard, event, b"T  WARN shard{rank=1}: t: slow ms=7\n").await;
        check(json, Role::Router, event, b"{\"timestamp\":\"T\",\"level\":\"WARN\",\"message\":\"slow\",\"ms\":7,\"target\":\"t\",\"process\":\"router\"}\n").await;
        check(text, shard, b"{\"not\":\"an event\"}\n", b"shard 1: {\"not\":\"an event\"}\n").await;
        let long = "x".repeat(300_000);
        check(text, shard, format!("{long}\n").as_bytes(), format!("shard 1: {long}\n").as_bytes())
            .await;
        let event = format!("{{\"level\":\"INFO\",\"message\":\"{long}\"}}\n");
        let want = format!("  INFO shard{{rank=1}}: : {long}\n");
        check(text, shard, event.as_bytes(), want.as_bytes()).await;
        let endless = vec![b'y'; LINE_BYTES_MAX + (100 << 10)];
        let got_lines = {
            let page = Page::default();
            let (log, writer) = ChildLog::start(text, page.clone()).unwrap();
            log.copy(shard, endless.as_slice()).await;
            writer.join().unwrap();
            let page = page.0.lock().unwrap();
            page.iter().filter(|byte| **byte == b'y').count()
        };
        assert_eq!(got_lines, endless.len(), "an endless line comes in pieces, whole");
    }
}
