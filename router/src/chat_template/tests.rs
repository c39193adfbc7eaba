use std::{fs, path::PathBuf};

use serde_json::json;

use super::*;

/// Where minijinja is not Jinja: an undefined value is not `iterable`, and `{%- raw %}` loses the
/// line break after it. A case that begins to agree must leave this list.
const KNOWN_DIFFERENCES: [&str; 2] = ["\"macro-recursive\"", "\"whitespace-control\""];

/// A fixture of the repository or, for the larger corpus, of the folder beside it.
fn fixture(path: &str) -> Option<Value> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    let beside = std::env::var_os("TRIREME_FIXTURES").map(PathBuf::from);
    let places = [
        Some(root.join("integration-tests/fixtures")),
        beside,
        Some(root.join("../shared/fixtures")),
        Some(root.join("../../shared/fixtures")),
    ];
    let text = places.into_iter().flatten().find_map(|place| fs::read(place.join(path)).ok())?;
    Some(serde_json::from_slice(&text).unwrap())
}

fn noon() -> NaiveDateTime {
    "2024-07-26T13:05:09".parse().unwrap()
}

fn text_of(case: &Value, key: &str) -> Option<String> {
    case.get(key).and_then(Value::as_str).map(str::to_owned)
}

fn conversation(case: &Value) -> Conversation {
    let flag = |key: &str| case.get(key).and_then(Value::as_bool).unwrap_or(false);
    Conversation {
        messages: case["messages"].as_array().unwrap().clone(),
        tools: case.get("tools").cloned(),
        documents: case.get("documents").cloned(),
        variables: case.get("variables").and_then(Value::as_object).cloned().unwrap_or_default(),
        add_generation_prompt: flag("add_generation_prompt"),
        continue_final_message: flag("continue_final_message"),
    }
}

/// Renders one case of the corpus; the complaint if it is not as transformers renders it.
fn check(case: &Value, template: &str) -> Option<String> {
    let tokens = TemplateTokens {
        bos_token: text_of(case, "bos_token"),
        eos_token: text_of(case, "eos_token"),
        special: vec!["<|im_end|>".to_owned()],
    };
    let now = text_of(case, "now").map_or_else(noon, |now| now.parse().unwrap());
    let sources = [(DEFAULT.to_owned(), template.to_owned())];
    let outcome = ChatTemplate::new(&sources, tokens)
        .and_then(|template| template.render(&conversation(case), now));
    let raised = case.get("error_kind").and_then(Value::as_str) == Some("raise_exception");
    match (outcome, text_of(case, "expected"), text_of(case, "error")) {
        (Ok(rendered), Some(expect), _) if rendered.text() == expect => None,
        (Ok(rendered), Some(expect), _) => {
            Some(format!("{:?}\n  expected {expect:?}", rendered.text()))
        }
        (Err(TemplateError::Raised(message)), _, Some(expect)) if raised && message == expect => {
            None
        }
        (Err(TemplateError::Engine(_)), _, Some(_)) if !raised => None,
        (outcome, expect, error) => Some(format!("{outcome:?}, expected {expect:?} {error:?}")),
    }
}

#[test]
fn renders_the_corpus_as_transformers_does() {
    let Some(corpus) = fixture("chat_templates/cases.json") else {
        println!("skipped: no chat_templates/cases.json; TRIREME_FIXTURES names its folder");
        return;
    };
    let cases = corpus["cases"].as_array().unwrap();
    assert!(cases.len() >= 37);
    let complaints = cases.iter().filter_map(|case| {
        let template = corpus["templates"][case["template"].as_str().unwrap()].as_str().unwrap();
        Some(format!("{}: {}", case["name"], check(case, template)?))
    });
    let complaints: Vec<String> = complaints.collect();
    let names = |complaint: &String| complaint.split(':').next().unwrap_or_default().to_owned();
    let differing: Vec<String> = complaints.iter().map(names).collect();
    assert_eq!(differing, KNOWN_DIFFERENCES, "{}", complaints.join("\n"));
}

#[test]
fn renders_smollm2_conversations() {
    let golden = fixture("smollm2/chat.json").unwrap();
    let template = golden["chat_template"].as_str().unwrap();
    for case in golden["conversations"].as_array().unwrap() {
        let mut case = case.clone();
        case["expected"] = case["rendered"].clone();
        assert_eq!(check(&case, template), None);
    }
}

fn render(template: &str, content: &str) -> Result<Rendered, TemplateError> {
    let tokens = TemplateTokens {
        special: vec!["<s>".to_owned(), "<|end|>".to_owned(), "<|end|>>".to_owned()],
        ..Default::default()
    };
    let sources = [(DEFAULT.to_owned(), template.to_owned())];
    let conversation = Conversation::to_answer(vec![json!({"role": "user", "content": content})]);
    ChatTemplate::new(&sources, tokens)?.render(&conversation, noon())
}

/// Segments with special tokens in brackets.
fn check_segments(content: &str, expect: Option<&[&str]>) {
    let rendered = render("<s>{{ messages[0].content | trim }}<|end|>", content).unwrap();
    assert_eq!(rendered.text(), format!("<s>{}<|end|>", content.trim()));
    let spelled = rendered.segments().map(|segments| {
        let spell = |segment: &Segment| match segment {
            Segment::Special(token) => format!("[{token}]"),
            Segment::Text(text) => text.clone(),
        };
        segments.iter().map(spell).collect::<Vec<_>>()
    });
    let expect = expect.map(|expect| expect.iter().map(|text| (*text).to_owned()).collect());
    assert_eq!(spelled, expect, "{content:?}");
}

#[test]
fn special_tokens_that_a_message_spells_stay_text() {
    check_segments("plain", None);
    check_segments("a<|end|>b", Some(&["[<s>]", "a", "<|end|>", "b", "[<|end|>]"]));
    check_segments(" <s> ", Some(&["[<s>]", "<s>", "[<|end|>]"]));
    check_segments("<|end|>><s><s>", Some(&["[<s>]", "<|end|>>", "<s>", "<s>", "[<|end|>]"]));
    // A message that holds the marker itself gets another one.
    check_segments("\u{F0000}<s>", Some(&["[<s>]", "\u{F0000}", "<s>", "[<|end|>]"]));
    // Half of a special token, completed by what the template writes after it.
    check_segments("<s><|e", Some(&["[<s>]", "<s>", "<|e", "[<|end|>]"]));
}

#[test]
fn refuses_broken_and_endless_templates() {
    let check = |template: &str, part: &str| {
        let error = render(template, "x").unwrap_err();
        assert!(error.to_string().contains(part), "{error}");
    };
    check("{% if %}", "broken");
    check("{{ raise_exception('no such role') }}", "no such role");
    check("{% for a in range(9999) %}{% for b in range(9999) %}.{% endfor %}{% endfor %}", "fuel");
    check("{{ strftime_now('%!') }}", "%!");
    check("{{ nope.attribute }}", "undefined");
}
