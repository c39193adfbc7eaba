//! A grammar under which an answer is nothing but calls, in the syntax of the model.

use std::fmt::Write;

use serde_json::{Map, Value, json};
use trireme_grammar::{Grammar, GrammarError};

use super::{Tool, ToolChoice, ToolSyntax, ToolUse};

/// The grammar of an answer that has to call, `None` where it need not. `special_id`: the id of a
/// special token of this spelling, which no text can produce.
///
/// # Errors
/// A tool's parameters are no schema.
pub fn grammar(
    of: &ToolUse,
    special_id: impl Fn(&str) -> Option<u32>,
) -> Result<Option<Grammar>, GrammarError> {
    let tools: Vec<&Tool> = match &of.choice {
        ToolChoice::Auto => return Ok(None),
        ToolChoice::Required => of.tools.iter().collect(),
        ToolChoice::Named(name) => of.tools.iter().filter(|tool| tool.name == *name).collect(),
    };
    let several = of.parallel && of.choice == ToolChoice::Required;
    let marker = |text: &str| match special_id(text) {
        Some(id) => format!("<[{id}]>"),
        None => quoted(text),
    };
    let mut rules = match of.syntax {
        ToolSyntax::Hermes => {
            let (open, close) = (marker("<tool_call>"), marker("</tool_call>"));
            let more = if several { " (\"\\n\" tagged)*" } else { "" };
            format!("start: tagged{more}\ntagged: {open} \"\\n\" call \"\\n\" {close}\n")
        }
        ToolSyntax::Mistral => {
            let more = if several { " (\", \" call)*" } else { "" };
            format!("start: {} \"[\" call{more} \"]\"\n", marker("[TOOL_CALLS]"))
        }
        ToolSyntax::LlamaJson => {
            let more = if several { " (\"; \" call)*" } else { "" };
            format!("start: call{more}\n")
        }
        ToolSyntax::Pythonic => {
            let more = if several { " (\", \" call)*" } else { "" };
            format!("start: \"[\" call{more} \"]\"\n")
        }
    };
    let names: Vec<String> = (0..tools.len()).map(|index| format!("call_{index}")).collect();
    let _ = writeln!(rules, "call: {}", names.join(" | "));
    for (index, tool) in tools.iter().enumerate() {
        match of.syntax {
            ToolSyntax::Pythonic => python_call(&mut rules, index, tool)?,
            syntax => json_call(&mut rules, index, tool, syntax)?,
        }
    }
    Ok(Some(Grammar::lark(rules)))
}

/// A literal of Lark, whose escapes are JSON's.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

fn json_call(
    rules: &mut String,
    index: usize,
    tool: &Tool,
    syntax: ToolSyntax,
) -> Result<(), GrammarError> {
    let key = if syntax == ToolSyntax::LlamaJson { "parameters" } else { "arguments" };
    let head = format!("{{\"name\": {}, \"{key}\": ", quoted(&tool.name));
    let schema = Grammar::inline_schema(&tool.parameters)?;
    let _ = writeln!(rules, "call_{index}: {} args_{index} \"}}\"", quoted(&head));
    let _ = writeln!(rules, "args_{index}: {schema}");
    Ok(())
}

/// `name(key=value, …)`: keys in the order of the schema, optional ones or not, values as JSON.
fn python_call(rules: &mut String, index: usize, tool: &Tool) -> Result<(), GrammarError> {
    let empty = Map::new();
    let properties = tool.parameters.get("properties").and_then(Value::as_object);
    let properties = properties.unwrap_or(&empty);
    let is_required = |key: &str| {
        let required = tool.parameters.get("required").and_then(Value::as_array);
        required.is_some_and(|keys| keys.iter().any(|other| other.as_str() == Some(key)))
    };
    let name = quoted(&format!("{}(", tool.name));
    let _ = writeln!(rules, "call_{index}: {name} first_{index}_0 \")\"");
    for (at, (key, schema)) in properties.iter().enumerate() {
        let (here, next) = (format!("{index}_{at}"), format!("{index}_{}", at + 1));
        let pair = quoted(&format!("{key}="));
        let later = quoted(&format!(", {key}="));
        let (skip_first, skip_later) = match is_required(key) {
            true => (String::new(), String::new()),
            false => (format!(" | first_{next}"), format!(" | later_{next}")),
        };
        let _ = writeln!(rules, "first_{here}: {pair} value_{here} later_{next}{skip_first}");
        let _ = writeln!(rules, "later_{here}: {later} value_{here} later_{next}{skip_later}");
        let schema = Grammar::inline_schema(&with_definitions(schema, &tool.parameters))?;
        let _ = writeln!(rules, "value_{here}: {schema}");
    }
    let end = format!("{index}_{}", properties.len());
    let _ = writeln!(rules, "first_{end}: \"\"\nlater_{end}: \"\"");
    Ok(())
}

/// A property's schema stands alone, so what it refers to has to stand in it.
fn with_definitions(schema: &Value, root: &Value) -> Value {
    let mut schema = if schema.is_object() { schema.clone() } else { json!({}) };
    for key in ["$defs", "definitions"] {
        if let (Some(entries), Some(definitions)) = (schema.as_object_mut(), root.get(key)) {
            entries.insert(key.to_owned(), definitions.clone());
        }
    }
    schema
}

#[cfg(test)]
mod tests {
    use trireme_grammar::{CheckFacts, Compiler, Vocabulary, check};

    use super::*;

    fn tools() -> std::sync::Arc<[Tool]> {
        let point =
            json!({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]});
        let move_to = json!({
            "type": "object",
            "$defs": {"point": point},
            "properties": {
                "fast": {"type": "boolean"},
                "to": {"$ref": "#/$defs/point"},
                "say": {"type": "string"},
            },
            "required": ["to"],
        });
        let wait = json!({"type": "object", "properties": {}, "additionalProperties": false});
        let tool = |name: &str, parameters| Tool { name: name.to_owned(), parameters };
        vec![tool("move", move_to), tool("wait", wait)].into()
    }

    /// Whether the grammar of these tools takes an answer as whole. Id 300 is `[TOOL_CALLS]`.
    fn takes(of: &ToolUse, answer: &str) -> bool {
        let special = |text: &str| (text == "[TOOL_CALLS]").then_some(300);
        let grammar = grammar(of, special).expect("schemas").expect("a grammar");
        let facts = CheckFacts { vocab_size: 301, special: vec![(300, "[TOOL_CALLS]".into())] };
        check(&grammar, &facts).expect(&grammar.text);
        let mut words: Vec<(Vec<u8>, bool)> = (0..=255).map(|byte| (vec![byte], false)).collect();
        words.resize(300, (Vec::new(), false));
        words[299] = (b"<end>".to_vec(), true);
        words.push((b"[TOOL_CALLS]".to_vec(), true));
        let tokens = words.iter().map(|(bytes, special)| (bytes.as_slice(), *special));
        let compiler = Compiler::new(&Vocabulary::new(tokens, &[299])).expect("a vocabulary");
        let mut matcher = compiler.compile(&grammar).expect("compiles");
        let (marked, rest) = match answer.strip_prefix("[TOOL_CALLS]") {
            Some(rest) => (vec![300], rest),
            None => (Vec::new(), answer),
        };
        let ids: Vec<u32> = marked.into_iter().chain(rest.bytes().map(u32::from)).collect();
        let mut takes = |id: &u32| !matcher.is_over() && matcher.advance(&[*id]).is_ok();
        ids.iter().all(&mut takes) && matcher.mask().is_ok_and(|mask| mask.allows(299))
    }

    #[test]
    fn an_answer_that_has_to_call_calls() {
        use ToolSyntax::{Hermes, LlamaJson, Mistral, Pythonic};
        let check = |syntax, choice: &ToolChoice, parallel, answer: &str, taken: bool| {
            let of = ToolUse { syntax, tools: tools(), choice: choice.clone(), parallel };
            assert_eq!(takes(&of, answer), taken, "{syntax} {choice:?} {parallel}: {answer}");
        };
        let (any, wait) = (ToolChoice::Required, ToolChoice::Named("wait".into()));
        let (moves, waits) = (
            r#"{"name": "move", "arguments": {"to":{"x":1}}}"#,
            r#"{"name": "wait", "arguments": {}}"#,
        );
        let tagged = |call: &str| format!("<tool_call>\n{call}\n</tool_call>");
        check(Hermes, &any, true, &tagged(moves), true);
        check(Hermes, &any, true, &format!("{}\n{}", tagged(moves), tagged(waits)), true);
        check(Hermes, &any, false, &format!("{}\n{}", tagged(moves), tagged(waits)), false);
        check(Hermes, &wait, true, &tagged(waits), true);
        check(Hermes, &wait, true, &tagged(moves), false);
        check(Hermes, &any, true, "Hello", false);
        check(Hermes, &any, true, &tagged(r#"{"name": "move", "arguments": {}}"#), false);
        check(Mistral, &any, true, &format!("[TOOL_CALLS][{moves}, {waits}]"), true);
        check(Mistral, &wait, true, &format!("[TOOL_CALLS][{waits}]"), true);
        check(LlamaJson, &any, true, &moves.replace("arguments", "parameters"), true);
        check(LlamaJson, &any, true, moves, false);
        check(Pythonic, &any, true, "[wait()]", true);
        check(Pythonic, &any, true, r#"[move(to={"x": 1}), wait()]"#, true);
        check(Pythonic, &any, true, r#"[move(fast=true, to={"x": 1}, say="a")]"#, true);
        check(Pythonic, &any, true, r#"[move(fast=true)]"#, false);
        check(Pythonic, &wait, true, "[wait(), wait()]", false);
    }
}
