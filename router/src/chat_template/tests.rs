use std::{fs, path::PathBuf};

use serde_json::json;
use trireme_checkpoint::Segment;

use super::*;

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
    let named = |name: &str| Some((name.to_owned(), text_of(case, name)?));
    let tokens = TemplateTokens {
        named: ["bos_token", "eos_token"].into_iter().filter_map(named).collect(),
        control: vec!["<|im_end|>".to_owned()],
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
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
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

/// A template of a model with a few control tokens, one of which begins as another does.
fn template(source: &str) -> Result<ChatTemplate, TemplateError> {
    let control = ["<s>", "<|end|>", "<|end|>>", "</think>"].map(str::to_owned).to_vec();
    let named = vec![("pad_token".to_owned(), "<pad>".to_owned())];
    ChatTemplate::new(&[(DEFAULT.to_owned(), source.to_owned())], TemplateTokens { named, control })
}

fn render(source: &str, content: &str) -> Result<Rendered, TemplateError> {
    let conversation = Conversation::to_answer(vec![json!({"role": "user", "content": content})]);
    template(source)?.render(&conversation, noon())
}

/// Segments with special tokens in brackets.
fn spelled(rendered: &Rendered) -> Option<Vec<String>> {
    let spell = |segment: &Segment| match segment {
        Segment::Special(token) => format!("[{token}]"),
        Segment::Text(text) => text.clone(),
    };
    rendered.segments().map(|segments| segments.iter().map(spell).collect())
}

fn check_segments(content: &str, expect: Option<&[&str]>) {
    let rendered = render("<s>{{ messages[0].content | trim }}<|end|>", content).unwrap();
    assert_eq!(rendered.text(), format!("<s>{}<|end|>", content.trim()));
    let expect = expect.map(|expect| expect.iter().map(|text| (*text).to_owned()).collect());
    assert_eq!(spelled(&rendered), expect, "{content:?}");
}

#[test]
fn special_tokens_that_a_message_spells_stay_text() {
    check_segments("plain", None);
    check_segments("a<|end|>b", Some(&["[<s>]", "a<|end|>b", "[<|end|>]"]));
    check_segments(" <s> ", Some(&["[<s>]", "<s>", "[<|end|>]"]));
    check_segments("<|end|>><s><s>", Some(&["[<s>]", "<|end|>><s><s>", "[<|end|>]"]));
    // A message that holds the marker itself gets another one.
    check_segments("\u{F0000}<s>", Some(&["[<s>]", "\u{F0000}<s>", "[<|end|>]"]));
    // Half of a special token before one that the template writes.
    check_segments("<s><|e", Some(&["[<s>]", "<s><|e", "[<|end|>]"]));
}

#[test]
fn a_conversation_that_leaves_no_marker_is_refused() {
    let all: String = rendered::MARKERS.collect();
    assert!(render("{{ messages[0].content }}", &all).is_ok());
    let error = render("{{ messages[0].content }}", &(all + "<s>")).unwrap_err();
    assert_eq!(error, TemplateError::NoFreeMarker);
}

/// Whatever part of a request spells a control token.
#[test]
fn only_the_template_writes_control_tokens() {
    let check = |source: &str, given: Value, expect: &[&str]| {
        let conversation = Conversation {
            messages: given["messages"].as_array().cloned().unwrap_or_default(),
            tools: given.get("tools").cloned(),
            documents: given.get("documents").cloned(),
            variables: given["variables"].as_object().cloned().unwrap_or_default(),
            ..Conversation::default()
        };
        let rendered = template(source).unwrap().render(&conversation, noon()).unwrap();
        let expect: Vec<String> = expect.iter().map(|text| (*text).to_owned()).collect();
        assert_eq!(spelled(&rendered), Some(expect), "{source} {given}");
    };
    check("<s>{{ tools | tojson }}", json!({"tools": ["<s>"]}), &["[<s>]", "[\"<s>\"]"]);
    check("<s>{{ tools | tojson }}", json!({"tools": {"<s>": 1}}), &["[<s>]", "{\"<s>\": 1}"]);
    let ascii = "<s>{{ documents | tojson(ensure_ascii=true) }}";
    check(ascii, json!({"documents": ["é<s>"]}), &["[<s>]", "[\"\\u00e9<s>\"]"]);
    check("<s>{{ style }}", json!({"variables": {"style": "<s>"}}), &["[<s>]", "<s>"]);
    check("<s>{{ messages[0].role }}", json!({"messages": [{"role": "<s>"}]}), &["[<s>]", "<s>"]);
    let answer = json!({"messages": [{"role": "assistant", "content": "a</think>b<|end|>"}]});
    check("<s>{{ messages[0].content }}", answer.clone(), &["[<s>]", "a</think>b<|end|>"]);
    // Parts, and what JSON escapes, that make a token together.
    let parts = json!([{"type": "text", "text": "a<|e "}, {"type": "text", "text": "nd|>"}]);
    let parts = json!({"messages": [{"role": "user", "content": parts}]});
    let joining = "<s>{% for p in messages[0].content %}{{ p.text | trim }}{% endfor %}";
    check(joining, parts, &["[<s>]", "a<|end|>"]);
    let call = json!({"function": {"arguments": "{\"x\": \"\\u003c|end|>\"}"}});
    let call = json!({"messages": [{"role": "assistant", "tool_calls": [call]}]});
    let arguments = "<s>{{ messages[0].tool_calls[0].function.arguments.x }}";
    check(arguments, call, &["[<s>]", "<|end|>"]);
    // A template that looks for a token in the model's words finds it, and it is that token.
    let looking = "{% if '</think>' in messages[0].content %}{{ messages[0].content }}{% endif %}";
    check(looking, answer, &["a", "[</think>]", "b<|end|>"]);
    let user = json!({"messages": [{"role": "user", "content": "a</think>b"}]});
    check("<s>{{ messages[0].content }}{# '</think>' in #}", user, &["[<s>]", "a</think>b"]);
}

#[test]
fn many_spelled_tokens_take_one_pass() {
    let content = "<|end|>><s><".repeat(100_000);
    let rendered = render("<s>{{ messages[0].content }}", &content).unwrap();
    let expect = vec!["[<s>]".to_owned(), content];
    assert!(spelled(&rendered) == Some(expect));
}

#[test]
fn templates_are_chosen_by_what_is_given() {
    let named = |name: &str| (name.to_owned(), format!("{name}: {{{{ pad_token }}}}"));
    let sources = [DEFAULT, WITH_TOOLS, WITH_DOCUMENTS].map(named);
    let tokens = TemplateTokens {
        named: vec![("pad_token".to_owned(), "<pad>".to_owned())],
        ..TemplateTokens::default()
    };
    let template = ChatTemplate::new(&sources, tokens).unwrap();
    let check = |tools: bool, documents: bool, expect: &str| {
        let some = |given: bool| given.then(|| json!([{}]));
        let (tools, documents) = (some(tools), some(documents));
        let conversation = Conversation { tools, documents, ..Conversation::default() };
        assert_eq!(template.render(&conversation, noon()).unwrap().text(), expect);
    };
    check(false, false, "default: <pad>");
    check(true, false, "tool_use: <pad>");
    check(false, true, "rag: <pad>");
    check(true, true, "tool_use: <pad>");
}

#[test]
fn messages_are_put_in_the_forms_that_the_template_knows() {
    let check = |source: &str, messages: Value, expect: &str| {
        let messages = messages.as_array().unwrap().clone();
        let rendered = template(source).unwrap().render(&Conversation::to_answer(messages), noon());
        assert_eq!(rendered.unwrap().text(), expect, "{source}");
    };
    let each = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}";
    let call = json!({"function": {"name": "f", "arguments": "{\"x\": [1, null]}"}});
    let messages = json!([
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
    ]);
    check(each, messages.clone(), "system:a\nb;assistant:;tool:1;");
    let calls = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}\
                 {{ c.function.arguments.x[0] + 1 }}{% endfor %}{% endfor %}";
    check(calls, messages.clone(), "{\"x\": [1, null]}2");
    let parts = "{% for p in messages[0].content %}<{{ p.text }}>{% endfor %}{{ messages[0].role }}\
                 {# developer #}{{ messages[1].content is none }}";
    check(parts, messages, "<a><b>developerTrue");
}

#[test]
fn a_prompt_has_one_end() {
    let message = json!({"role": "assistant", "content": "x"});
    let both =
        Conversation { continue_final_message: true, ..Conversation::to_answer(vec![message]) };
    let error = template("{{ messages[0].content }}").unwrap().render(&both, noon()).unwrap_err();
    assert_eq!(error, TemplateError::TwoEnds);
}

/// As Jinja2 reads them, in words that minijinja has another way.
#[test]
fn jinja2s_own_ways_are_kept() {
    let check = |source: &str, expect: &str| {
        assert_eq!(render(source, "x").unwrap().text(), expect, "{source:?}");
    };
    check("{% raw %}\n{% generation %}{% endraw %}\n.", "\n{% generation %}.");
    check("{% raw -%}\n a{% endraw %}", "a");
    check("{% generation %}\na{% endgeneration %}\nb", "ab");
    check(
        "{{ nope is iterable }} {{ 3 is iterable }} {{ 'a' is iterable }} {{ none is iterable }}",
        "True False True False",
    );
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
