//! What a line of a conversation asks for.

pub const HELP: &str = "\
/reset        forget the conversation
/system TEXT  start anew with this system message; without TEXT, with none
/save FILE    write the conversation as JSON
/exit         end (so does Ctrl-D)
//TEXT        say a TEXT that starts with a slash";

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    Nothing,
    Help,
    Reset,
    System(Option<String>),
    Save(String),
    Exit,
    Say(String),
    Wrong(String),
}

impl Command {
    pub fn parse(line: &str) -> Self {
        let line = line.trim();
        let Some(command) = line.strip_prefix('/') else {
            return if line.is_empty() { Self::Nothing } else { Self::Say(line.to_owned()) };
        };
        if command.starts_with('/') {
            return Self::Say(command.to_owned());
        }
        let (verb, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let rest = rest.trim();
        match (verb, rest.is_empty()) {
            ("help" | "?", true) => Self::Help,
            ("reset", true) => Self::Reset,
            ("system", empty) => Self::System((!empty).then(|| rest.to_owned())),
            ("save", false) => Self::Save(rest.to_owned()),
            ("save", true) => Self::Wrong("/save needs a FILE".to_owned()),
            ("exit" | "quit" | "bye", true) => Self::Exit,
            _ => Self::Wrong(format!("no command '/{command}'; /help lists them")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_understood() {
        let check = |line: &str, want: Command| assert_eq!(Command::parse(line), want, "{line}");
        check("", Command::Nothing);
        check("  \t", Command::Nothing);
        check(" hello there ", Command::Say("hello there".to_owned()));
        check("/help", Command::Help);
        check("/reset", Command::Reset);
        check("/reset now", Command::Wrong("no command '/reset now'; /help lists them".to_owned()));
        check("/system be  brief", Command::System(Some("be  brief".to_owned())));
        check("/system", Command::System(None));
        check("/save a b.json", Command::Save("a b.json".to_owned()));
        check("/save", Command::Wrong("/save needs a FILE".to_owned()));
        check("/exit", Command::Exit);
        check("/bye", Command::Exit);
        check("/", Command::Wrong("no command '/'; /help lists them".to_owned()));
        check("//etc is a folder", Command::Say("/etc is a folder".to_owned()));
    }
}
