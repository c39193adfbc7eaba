//! Grammars made to stall a server: refused soon, or answered, while other streams go on.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::{Map, Value, json};
use trireme_integration_tests::{
    fixture,
    server::{Server, ServerOptions},
};

/// More than a hostile grammar may take, on a machine that does something else as well.
const ANSWER_LIMIT: Duration = Duration::from_secs(8);
/// As above, between two tokens of another stream.
const GAP_LIMIT: Duration = Duration::from_secs(2);

struct Hostile {
    name: &'static str,
    field: &'static str,
    value: Value,
}

fn regex(name: &'static str, pattern: impl Into<String>) -> Hostile {
    Hostile { name, field: "guided_regex", value: json!(pattern.into()) }
}

fn schema(name: &'static str, value: Value) -> Hostile {
    Hostile { name, field: "guided_json", value }
}

fn lark(name: &'static str, text: impl Into<String>) -> Hostile {
    Hostile { name, field: "guided_grammar", value: json!(text.into()) }
}

fn regexes() -> Vec<Hostile> {
    let words: Vec<String> =
        (0..12_000u32).map(|i| format!("w{:x}", i.wrapping_mul(2_654_435_761))).collect();
    let choices = Hostile {
        name: "10,000 choices",
        field: "guided_choice",
        value: json!(words[..10_000].to_vec()),
    };
    let none = Hostile { name: "no choice", field: "guided_choice", value: json!([]) };
    vec![
        regex("open groups", "((((("),
        regex("20,000 open groups", "(".repeat(20_000)),
        regex("1000 nested stars", format!("{}a{}", "(a".repeat(1000), ")*".repeat(1000))),
        regex("1 MiB of letters", "a".repeat(1 << 20)),
        regex("look-ahead", "(?=a)b"),
        regex("stars of stars", "((((a*)*)*)*)*b"),
        regex("three counts nested", "((a{1,100}){1,100}){1,100}"),
        regex("three counts of any nested", "((.{1,200}b){1,200}c){1,200}"),
        regex("a count of 1e9", "[a-z]{1000000000}"),
        regex("a count up to 100,000", "[a-z]{1,100000}"),
        regex("optional letters before their count", format!("(a?){{{0}}}a{{{0}}}", 3000)),
        regex("an unanchored window", "(.*a.{1,60}b.*)+"),
        regex("12,000 words", format!("({})", words.join("|"))),
        regex("overlapping words", format!("(.*({}).*)+", words[..2000].join("|"))),
        regex("letters of all scripts", r"(\p{L}{1,500}\P{Lu}\w{1,500}){1,50}"),
        regex("any character 5000 times", r"[\u{0}-\u{10FFFF}]{5000}"),
        regex("case folded", format!("(?i){}", r"[\p{L}\p{N}]{0,40}(straße|ſ)".repeat(60))),
        choices,
        none,
    ]
}

fn schemas() -> Vec<Hostile> {
    let nested =
        |depth| (0..depth).fold(json!({}), |inner, _| json!({"type": "array", "items": inner}));
    let doubled =
        (0..11).fold(json!({"type": "integer"}), |inner, _| json!({"allOf": [inner, inner]}));
    let doubled_any =
        (0..11).fold(json!({"type": "integer"}), |inner, _| json!({"anyOf": [inner, inner]}));
    let patterns: Vec<Value> = (0..20)
        .map(|index| json!({"type": "string", "pattern": format!(".*a{{{index}}}b.*")}))
        .collect();
    let properties = |count: usize| -> Map<String, Value> {
        (0..count).map(|index| (format!("p{index}"), json!({"type": "string"}))).collect()
    };
    let by_pattern: Map<String, Value> =
        (0..60).map(|index| (format!(".*{index}.*a.*"), json!({"type": "integer"}))).collect();
    let formats: Vec<Value> = ["email", "uuid", "date-time", "ipv6", "hostname", "uri"]
        .map(|format| json!({"type": "string", "format": format}))
        .to_vec();
    let numbers: Vec<u32> = (0..20_000).collect();
    let node = json!({"anyOf": [
        {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1},
        {"type": "object", "additionalProperties": {"$ref": "#/$defs/n"}, "minProperties": 1},
    ]});
    vec![
        schema("100 deep", nested(100)),
        schema("60 deep", nested(60)),
        schema("allOf doubled 11 times", doubled),
        schema("anyOf doubled 11 times", doubled_any),
        schema("20 patterns at once", json!({"allOf": patterns})),
        schema("6 formats at once", json!({"allOf": formats})),
        schema("2500 optional properties", json!({"properties": properties(2500)})),
        schema("60 patterns of names", json!({"patternProperties": by_pattern})),
        schema("a description of 1 MiB", json!({"description": "x".repeat(1 << 20)})),
        schema("20,000 numbers", json!({"enum": numbers})),
        schema("itself", json!({"$ref": "#"})),
        schema("a file", json!({"$ref": "file:///etc/passwd"})),
        schema("a tree without leaves", json!({"$defs": {"n": node}, "$ref": "#/$defs/n"})),
        schema("1e9 letters at least", json!({"type": "string", "minLength": 1_000_000_000})),
        schema("1e9 letters at most", json!({"type": "string", "maxLength": 1_000_000_000})),
        schema("1e9 items", json!({"type": "array", "minItems": 1_000_000_000})),
        schema("1e9 properties", json!({"type": "object", "minProperties": 1_000_000_000})),
        schema("a range to 1e300", json!({"type": "number", "minimum": -1e300, "maximum": 1e300})),
        schema("multiples of 1e-9", json!({"type": "number", "multipleOf": 1e-9})),
        schema("multiples of 999,983", json!({"type": "integer", "multipleOf": 999_983})),
    ]
}

fn larks() -> Vec<Hostile> {
    let rules = |count: usize| {
        let rules: Vec<String> =
            (0..count).map(|i| format!("r{i}: r{} r{} | \"a\"", i + 1, i + 1)).collect();
        format!("start: r0\n{}\nr{count}: \"b\"", rules.join("\n"))
    };
    vec![
        lark("9000 groups", format!("start: {}\"a\"{}", "(".repeat(9000), ")".repeat(9000))),
        lark("only itself", "start: start"),
        lark("left recursion", "start: start \"a\" | \"a\""),
        lark("two of itself", "start: start start | \"a\" |"),
        lark("30 doublings", rules(30)),
        lark("a terminal of 50,000", "start: A A\nA: /a{1,50000}/"),
        lark("terminals at once", "start: A & B\nA: /(.*a.{1,40})+/\nB: /(.*b.{1,40})+/"),
        lark("what a terminal is not", "start: A\nA: ~/(.*[ab].{1,30}c.*)+/"),
    ]
}

/// What became of one of them.
struct Outcome {
    status: u16,
    time: Duration,
    /// The longest time between two tokens of another stream meanwhile.
    gap: Duration,
}

/// `extra` is of the hostile request; the other stream has `tokens`.
async fn outcome(
    server: &Server,
    hostile: &Hostile,
    extra: &Value,
    tokens: usize,
) -> Result<Outcome> {
    let client = server.client();
    let request = json!({
        "prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": true, "stream": true, "seed": 1,
    });
    let Hostile { name, field, value } = hostile;
    let mut stream = client.stream("/v1/completions", &request).await?;
    assert!(stream.next().await?.is_some(), "the stream began");
    let mut body = json!({"prompt": [5], "max_tokens": 5});
    let fields = extra.as_object().expect("an object");
    body.as_object_mut().expect("an object").extend(fields.clone());
    body[*field] = value.clone();
    let start = Instant::now();
    let refusing = server.client();
    let refused = async {
        let answer = refusing.post("/v1/completions", &body).await?;
        anyhow::Ok((answer, start.elapsed()))
    };
    let going_on = async {
        let (mut events, mut last, mut gap) = (0, Instant::now(), Duration::ZERO);
        while let Some(data) = stream.next().await? {
            events += usize::from(data != "[DONE]");
            gap = gap.max(last.elapsed());
            last = Instant::now();
        }
        anyhow::Ok((events, gap))
    };
    let (refused, going_on) = tokio::join!(refused, going_on);
    let ((answer, time), (events, gap)) = (refused?, going_on?);
    assert!(events >= tokens - 1, "{name}: the stream had {events} more events");
    let said = String::from_utf8_lossy(&answer.body);
    // A heavy grammar that stays within the limits is answered.
    let status = answer.status.as_u16();
    assert!(matches!(status, 200 | 400), "{name}: {status} {said}");
    assert!(status == 200 || said.contains(field), "{name}: {said}");
    Ok(Outcome { status, time, gap })
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_grammars_are_refused_while_streams_go_on() -> Result<()> {
    let tiny = ServerOptions::new(fixture::path("models/smollm-like"));
    let server = Server::start(&tiny.split(2, 1))?;
    let all: Vec<Hostile> = regexes().into_iter().chain(schemas()).chain(larks()).collect();
    let mut refusals = 0;
    for hostile in &all {
        let Outcome { status, time, gap } = outcome(&server, hostile, &json!({}), 500).await?;
        let (field, name) = (hostile.field, hostile.name);
        println!("| {field} | {name} | {status} | {} | {} |", time.as_millis(), gap.as_millis());
        assert!(time < ANSWER_LIMIT, "{name} took {time:?}");
        assert!(gap < GAP_LIMIT, "{name}: another stream stood still for {gap:?}");
        refusals += usize::from(status == 400);
    }
    assert!(refusals >= 20, "only {refusals} of {} were refused", all.len());
    Ok(())
}

/// Cheap to compile and to begin with; the longer the answer, the dearer its masks.
#[tokio::test(flavor = "multi_thread")]
async fn a_grammar_whose_masks_get_dear_ends_its_own_answers_only() -> Result<()> {
    let server = Server::start(&ServerOptions::new(fixture::smollm2()).split(2, 1))?;
    for text in [
        "start: s\ns: s s | s s s | /[a-z ]/",
        "start: a*\na: b*\nb: c*\nc: /[a-z ]/?",
        "start: x x x x x x\nx: | W x | x W\nW: /[a-z ]/",
    ] {
        let hostile = lark("an ambiguous one", text);
        let extra = json!({"n": 16, "max_tokens": 120, "temperature": 1, "seed": 1});
        let Outcome { status, time, gap } = outcome(&server, &hostile, &extra, 60).await?;
        println!("{text:?}: {status}, {} ms, {} ms", time.as_millis(), gap.as_millis());
        assert_eq!(status, 400, "{text}");
        assert!(gap < GAP_LIMIT, "{text}: another stream stood still for {gap:?}");
    }
    Ok(())
}
