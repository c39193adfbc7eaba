//! `generate`: one prompt, answered as it comes.

use std::io::{Read, Write, stderr, stdin, stdout};

use anyhow::Context;
use trireme_proto::generate::v1::{
    GenerateRequest, Message, Messages, TokenIds, generate_request::Prompt,
};

use super::session::{self, Interrupt, with_server};
use crate::{
    answer::{Incoming, Print, parameters},
    cli::GenerateArgs,
};

pub fn generate(args: &GenerateArgs) -> anyhow::Result<()> {
    let request = request(args, &mut stdin())?;
    let print = if args.prompt_ids.is_empty() { Print::Text } else { Print::Ids };
    let engine = session::engine(&args.engine);
    with_server(&args.engine, &engine, &args.connect, Interrupt::Ends, async |channel| {
        let mut out = stdout();
        let mut incoming = Incoming::new(&mut out, print);
        incoming.receive(channel, request).await?;
        let summary = incoming.answer.summary();
        writeln!(stderr(), "{summary}")?;
        Ok(())
    })
}

fn request(args: &GenerateArgs, input: &mut dyn Read) -> anyhow::Result<GenerateRequest> {
    let prompt = match args.prompt.as_deref() {
        None => Prompt::Ids(TokenIds { ids: args.prompt_ids.clone() }),
        Some(text) => {
            let mut content = text.to_owned();
            if text == "-" {
                content.clear();
                input.read_to_string(&mut content).context("--prompt -: read standard input")?;
            }
            if args.chat {
                let role = "user".to_owned();
                Prompt::Messages(Messages { messages: vec![Message { role, content }] })
            } else {
                Prompt::Text(content)
            }
        }
    };
    let mut parameters = parameters(&args.sampling, args.engine.seed);
    parameters.stop = args.stop.clone();
    parameters.ignore_eos = args.ignore_eos;
    Ok(GenerateRequest { prompt: Some(prompt), parameters: Some(parameters), ..Default::default() })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Verb};

    #[test]
    fn flags_become_a_request() {
        let check = |flags: &[&str], want: Prompt| {
            let words = ["trireme", "generate"].iter().chain(flags);
            let Verb::Generate(args) = Cli::parse_from(words).verb else { panic!("{flags:?}") };
            let request = request(&args, &mut "from stdin".as_bytes()).unwrap();
            assert_eq!(request.prompt, Some(want), "{flags:?}");
            let parameters = request.parameters.unwrap();
            assert_eq!(parameters.max_new_tokens, Some(200));
            assert_eq!(parameters.temperature, None, "greedy unless asked");
        };
        check(&["--prompt", "hi"], Prompt::Text("hi".to_owned()));
        check(&["--prompt", "-"], Prompt::Text("from stdin".to_owned()));
        check(&["--prompt-ids", "5,6"], Prompt::Ids(TokenIds { ids: vec![5, 6] }));
        let message = Message { role: "user".to_owned(), content: "hi".to_owned() };
        check(
            &["--prompt", "hi", "--chat"],
            Prompt::Messages(Messages { messages: vec![message] }),
        );
    }
}
