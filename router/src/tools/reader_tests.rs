use super::*;
use crate::tools::ToolChoice;

fn reader(syntax: ToolSyntax, parallel: bool) -> CallReader {
    let tool = |name: &str| Tool { name: name.to_owned(), parameters: serde_json::json!({}) };
    let tools = vec![tool("weather"), tool("add")].into();
    CallReader::new(&ToolUse { syntax, tools, choice: ToolChoice::Auto, parallel })
}

/// The text and the calls of an answer, however it is cut.
fn check(syntax: ToolSyntax, answer: &str, text: &str, calls: &[(&str, &str)]) {
    let characters: Vec<char> = answer.chars().collect();
    for size in [1, 2, 3, 7, characters.len().max(1)] {
        let mut reader = reader(syntax, true);
        let pieces = characters.chunks(size).map(|piece| piece.iter().collect::<String>());
        let mut events: Vec<CallEvent> = pieces.flat_map(|piece| reader.push(&piece)).collect();
        events.extend(reader.finish());
        let mut said = String::new();
        let mut found: Vec<(String, String)> = Vec::new();
        for event in events {
            match event {
                CallEvent::Text(text) => said.push_str(&text),
                CallEvent::Begin { index, name } => {
                    assert_eq!(index, found.len(), "{answer}");
                    found.push((name, String::new()));
                }
                CallEvent::Arguments { index, text } => found[index].1.push_str(&text),
            }
        }
        let found: Vec<(&str, &str)> =
            found.iter().map(|(name, arguments)| (name.as_str(), arguments.as_str())).collect();
        assert_eq!((said.as_str(), found.as_slice()), (text, calls), "{answer} by {size}");
        assert_eq!(reader.calls(), calls.len());
    }
}

const WEATHER: &str = r#"{"name": "weather", "arguments": {"city": "Paris {"}}"#;
const PARIS: (&str, &str) = ("weather", r#"{"city": "Paris {"}"#);
const ADD: (&str, &str) = ("add", r#"{"a":1}"#);

#[test]
fn hermes_calls_stand_in_tags() {
    let check = |answer: &str, text: &str, calls: &[_]| {
        check(ToolSyntax::Hermes, answer, text, calls);
    };
    check("Hello <b> there.\n", "Hello <b> there.\n", &[]);
    check(&format!("<tool_call>\n{WEATHER}\n</tool_call>"), "", &[PARIS]);
    check(&format!("Let me see.\n\n<tool_call>{WEATHER}</tool_call>\n"), "Let me see.", &[PARIS]);
    let two = format!(
        "<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{{\"arguments\":{{\"a\":1}},\"name\":\"add\"}}\n</tool_call>"
    );
    check(&two, "", &[PARIS, ADD]);
    check("<tool_call>{\"city\": 1}</tool_call>", "<tool_call>{\"city\": 1}</tool_call>", &[]);
    check("a <tool_ca", "a <tool_ca", &[]);
    check("<tool_call>{\"name\": \"we", "<tool_call>{\"name\": \"we", &[]);
    let cut = ("weather", r#"{"city": "Pa"#);
    check("<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Pa", "", &[cut]);
}

#[test]
fn mistral_calls_follow_their_marker() {
    let check = |answer: &str, text: &str, calls: &[_]| {
        check(ToolSyntax::Mistral, answer, text, calls);
    };
    check("Plain [text]", "Plain [text]", &[]);
    check(&format!("[TOOL_CALLS][{WEATHER}]"), "", &[PARIS]);
    let list =
        format!("See: [TOOL_CALLS] [{WEATHER}, {{\"name\":\"add\",\"arguments\":{{\"a\":1}}}}]");
    check(&list, "See:", &[PARIS, ADD]);
    let newer = "[TOOL_CALLS]weather[ARGS]{\"city\": \"Paris {\"}[TOOL_CALLS]add{\"a\":1}";
    check(newer, "", &[PARIS, ADD]);
    check("[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{\"a\":1}", "", &[ADD]);
}

#[test]
fn llama_calls_are_the_answer() {
    let check = |answer: &str, text: &str, calls: &[_]| {
        check(ToolSyntax::LlamaJson, answer, text, calls);
    };
    check("The answer is {4}.", "The answer is {4}.", &[]);
    check(" {\"city\": \"Paris\"}", " {\"city\": \"Paris\"}", &[]);
    check("{\"name\": \"Paris\"}", "{\"name\": \"Paris\"}", &[]);
    check(&format!("<|python_tag|>{WEATHER}"), "", &[PARIS]);
    let two = format!("{WEATHER}; {{\"name\": \"add\", \"parameters\": {{\"a\":1}}}}");
    check(&two, "", &[PARIS, ADD]);
    check("<|python", "<|python", &[]);
}

#[test]
fn pythonic_calls_are_a_list() {
    let check = |answer: &str, text: &str, calls: &[_]| {
        check(ToolSyntax::Pythonic, answer, text, calls);
    };
    let paris = ("weather", r#"{"city":"Paris )"}"#);
    check("[1, 2]", "[1, 2]", &[]);
    check("Hello", "Hello", &[]);
    check("[weather(city='Paris )')]", "", &[paris]);
    check("<|python_start|>[weather(city='Paris )'), add(a=1)]<|python_end|>", "", &[paris, ADD]);
    check("[weather", "[weather", &[]);
    check("[add(a=1), wea", "", &[ADD]);
    check("[other(a=1)]", "[other(a=1)]", &[]);
}

#[test]
fn one_call_is_enough_where_asked_for() {
    for (syntax, answer) in [
        (
            ToolSyntax::Hermes,
            format!("<tool_call>{WEATHER}</tool_call><tool_call>{WEATHER}</tool_call>"),
        ),
        (ToolSyntax::Mistral, format!("[TOOL_CALLS][{WEATHER},{WEATHER}]")),
        (ToolSyntax::LlamaJson, format!("{WEATHER};{WEATHER}")),
        (ToolSyntax::Pythonic, "[add(a=1), add(a=2)]".to_owned()),
    ] {
        let mut reader = reader(syntax, false);
        let mut events = reader.push(&answer);
        events.extend(reader.finish());
        assert_eq!(reader.calls(), 1, "{syntax}");
        assert!(events.iter().all(|event| !matches!(event, CallEvent::Text(_))), "{events:?}");
    }
}
