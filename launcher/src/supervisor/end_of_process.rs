//! How a process ended, in words that help.

use std::{os::unix::process::ExitStatusExt, process::ExitStatus};

/// `code 3`, or the signal with its usual cause.
pub fn describe(status: ExitStatus) -> String {
    let Some(signal) = status.signal() else {
        return format!("exited with code {}", status.code().unwrap_or(-1));
    };
    let (name, cause) = match signal {
        4 => ("SIGILL", "this CPU lacks an instruction that the program was built with"),
        6 => ("SIGABRT", "the program gave itself up; its last lines say why"),
        7 => (
            "SIGBUS",
            "memory behind a mapping is gone: /dev/shm is full, or a model file was cut while in use",
        ),
        9 => (
            "SIGKILL",
            "most often the kernel, out of memory (`dmesg` tells); else someone's `kill -9`",
        ),
        11 => ("SIGSEGV", "a defect of the program"),
        15 => ("SIGTERM", "someone asked it to stop"),
        _ => return format!("was ended by signal {signal}"),
    };
    format!("was ended by {name}: {cause}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_explained() {
        let check = |raw: i32, parts: &[&str]| {
            let text = describe(ExitStatus::from_raw(raw));
            for part in parts {
                assert!(text.contains(part), "{raw}: {text}");
            }
        };
        check(3 << 8, &["code 3"]);
        check(0, &["code 0"]);
        check(4, &["SIGILL", "instruction"]);
        check(7, &["SIGBUS", "/dev/shm"]);
        check(9, &["SIGKILL", "memory"]);
        check(11 | 0x80, &["SIGSEGV"]);
        check(31, &["signal 31"]);
    }
}
