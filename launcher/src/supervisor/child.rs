//! One life of one process: started in a group of its own, read to the last line, waited for.

use std::{fs, io, process::Stdio};

use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    process::{Child as Process, Command},
    sync::mpsc,
    task::AbortHandle,
};

use super::{Event, Happening};
use crate::{
    api_key,
    child_log::ChildLog,
    topology::{ProcessSpec, Role},
};

/// What children start with.
#[derive(Clone, Debug)]
pub struct Nursery {
    pub log: ChildLog,
    /// Variables that children must not see: they are our own flags.
    pub hidden_variables: Vec<String>,
    /// Filter of the children's logs, where the user set none.
    pub log_filter: Option<&'static str>,
}

/// A running process. Dropping it kills it.
#[derive(Debug)]
pub struct Child {
    signals: mpsc::Sender<Signal>,
    waiter: AbortHandle,
    pub watcher: AbortHandle,
}

impl Drop for Child {
    fn drop(&mut self) {
        self.watcher.abort();
        self.waiter.abort(); // drops the process, and with it kills it if it still runs
    }
}

impl Child {
    /// Starts a process. Must run on a thread that lives as long as the child may: the kernel tells
    /// a child of its parent's death when the *thread* that forked it ends.
    pub fn start(
        spec: &ProcessSpec,
        life: u64,
        nursery: &Nursery,
        events: mpsc::Sender<Event>,
    ) -> io::Result<(Self, Option<u32>)> {
        match fs::remove_file(&spec.socket) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let mut command = Command::new(&spec.program);
        command
            .args(&spec.args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C goes to a terminal's whole group: children must hear of it from us alone.
            .process_group(0)
            .kill_on_drop(true);
        for variable in &nursery.hidden_variables {
            command.env_remove(variable);
        }
        if spec.role != Role::Router {
            command.env_remove(api_key::VARIABLE);
        }
        for (variable, value) in &spec.variables {
            if std::env::var_os(variable).is_none() {
                command.env(variable, value);
            }
        }
        if let Some(filter) = nursery.log_filter {
            command.env(trireme_telemetry::LOG_VARIABLE, filter);
        }
        let mut process = command.spawn()?;
        let pid = process.id();
        let out = process.stdout.take().map(|pipe| nursery.log.clone().copy(spec.role, pipe));
        let err = process.stderr.take().map(|pipe| nursery.log.clone().copy(spec.role, pipe));
        // Both pipes are read at once: a full one must not hold up the other, or the child.
        out.map(tokio::spawn);
        err.map(tokio::spawn);
        let (signals, orders) = mpsc::channel(8);
        let role = spec.role;
        let waiter = tokio::spawn(async move {
            let status = wait(process, orders).await;
            let happening = match status {
                Ok(status) => Happening::Ended(status),
                Err(error) => Happening::Hung(format!("cannot be waited for: {error}")),
            };
            let _ = events.send(Event { role, life, happening }).await;
        });
        let watcher = tokio::spawn(std::future::ready(())).abort_handle();
        Ok((Self { signals, waiter: waiter.abort_handle(), watcher }, pid))
    }

    /// Sends a signal, unless the process has ended.
    pub fn signal(&self, signal: Signal) {
        // A full queue holds signals enough.
        let _ = self.signals.try_send(signal);
    }
}

/// Waits for the end; sends signals in between. Only who waits may send: once the end was seen, the
/// process id may be another's.
async fn wait(
    mut process: Process,
    mut orders: mpsc::Receiver<Signal>,
) -> io::Result<std::process::ExitStatus> {
    loop {
        tokio::select! {
            status = process.wait() => return status,
            Some(signal) = orders.recv() => {
                if let Some(pid) = process.id().and_then(|id| Pid::from_raw(id as i32)) {
                    let _ = kill_process(pid, signal);
                }
            }
        }
    }
}
