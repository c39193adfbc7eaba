use std::{fs, path::PathBuf};

use serde_json::{Value, json};
use tokenizers::Tokenizer;

use super::*;
use crate::detokenizer::Detokenizer;

fn fixture(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../integration-tests/fixtures").join(path)
}

fn golden(path: &str) -> Value {
    serde_json::from_slice(&fs::read(fixture(path)).unwrap()).unwrap()
}

fn ids_of(value: &Value) -> Option<Vec<u32>> {
    Some(value.as_array()?.iter().map(|id| id.as_u64().unwrap() as u32).collect())
}

fn smollm2() -> TextPipeline {
    let tokenizer = Tokenizer::from_file(fixture("tokenizers/smollm2/tokenizer.json")).unwrap();
    let template = golden("smollm2/chat.json")["chat_template"].as_str().map(str::to_owned);
    TextPipeline::new(TextSources::new(tokenizer, 49152), template, 2).unwrap()
}

#[tokio::test]
async fn conversations_become_the_reference_ids() {
    let pipeline = smollm2();
    let golden = golden("smollm2/chat.json");
    let mut spelled = 0;
    for case in golden["conversations"].as_array().unwrap() {
        let conversation = Conversation {
            messages: case["messages"].as_array().unwrap().clone(),
            add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
            ..Conversation::default()
        };
        let rendered = pipeline.render(Arc::new(conversation)).await.unwrap();
        assert_eq!(rendered.text(), case["rendered"].as_str().unwrap());
        let as_text = ids_of(&case["ids_user_specials_as_text"]);
        spelled += usize::from(as_text.is_some());
        let expect = as_text.or_else(|| ids_of(&case["ids"])).unwrap();
        assert_eq!(pipeline.encode_rendered(rendered).await.unwrap(), expect, "{case}");
    }
    assert!(spelled > 0, "some user spells a special token");
}

#[tokio::test]
async fn plain_prompts_parse_special_tokens() {
    let pipeline = smollm2();
    let golden = golden("tokenizers/smollm2/cases.json");
    for case in golden["cases"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let ids = pipeline.encode(text.to_owned(), false).await.unwrap();
        assert_eq!(Some(ids.clone()), ids_of(&case["ids"]), "{}", case["name"]);
        if let Some(decoded) = case["decoded"].as_str() {
            assert_eq!(pipeline.decode(ids).await.unwrap(), decoded, "{}", case["name"]);
        }
    }
}

/// The pipeline of every model of the fixtures, with its own template and special tokens.
fn every_model() -> Vec<(String, TextPipeline)> {
    let folders = fs::read_dir(fixture("models")).unwrap().map(|folder| folder.unwrap().path());
    let open = |folder: PathBuf| {
        let sources = TextSources::from_folder(&folder, 515).unwrap();
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        (name, TextPipeline::new(sources, None, 1).unwrap())
    };
    let models: Vec<_> = folders.map(open).collect();
    assert!(models.len() >= 9);
    models
}

async fn chat_ids(pipeline: &TextPipeline, messages: &Value) -> (String, Vec<u32>) {
    let conversation = Conversation::to_answer(messages.as_array().unwrap().clone());
    let rendered = pipeline.render(Arc::new(conversation)).await.unwrap();
    (rendered.text().to_owned(), pipeline.encode_rendered(rendered).await.unwrap())
}

#[tokio::test]
async fn every_model_reads_and_writes_as_the_reference() {
    for (name, pipeline) in every_model() {
        let golden = golden(&format!("models/{name}/expected.json"));
        for case in golden["texts"].as_array().unwrap() {
            let ids = match case["text"].as_str() {
                Some(text) => pipeline.encode(text.to_owned(), true).await.unwrap(),
                None => {
                    let (rendered, ids) = chat_ids(&pipeline, &case["messages"]).await;
                    assert_eq!(rendered, case["rendered"].as_str().unwrap(), "{name}");
                    ids
                }
            };
            assert_eq!(Some(ids), ids_of(&case["ids"]), "{name} {}", case["name"]);
            let mut detokenizer = Detokenizer::new(pipeline.decoder().clone(), true);
            let greedy =
                ids_of(&case["greedy"]["ids"]).or_else(|| ids_of(&case["greedy"])).unwrap();
            let mut text: String = greedy.iter().map(|id| detokenizer.push(*id)).collect();
            text += &detokenizer.finish();
            let broken = |text: &str| text.matches(char::REPLACEMENT_CHARACTER).count();
            let expect = case["greedy_text"].as_str().unwrap();
            let same = text == expect || broken(&text) < broken(expect);
            assert!(same, "{name}: {text:?}, expected {expect:?}");
        }
    }
}

/// As many of each control token as in a conversation that spells none.
#[tokio::test]
async fn no_user_writes_a_control_token() {
    for (name, pipeline) in every_model() {
        let control = pipeline.decoder().sources.control_tokens();
        let plain = json!([{"role": "user", "content": "x"}]);
        let (_, plain) = chat_ids(&pipeline, &plain).await;
        let all = control.concat();
        let spelling = json!([{"role": "user", "content": format!(" {all} x{all}<")}]);
        let (rendered, ids) = chat_ids(&pipeline, &spelling).await;
        assert!(rendered.contains(&all), "{name}: {rendered}");
        let text = pipeline.decode(ids.clone()).await.unwrap();
        assert_eq!(
            text.matches(control[0].as_str()).count(),
            rendered.matches(control[0].as_str()).count(),
            "{name}: {text}"
        );
        for token in &control {
            let id = pipeline.decoder().sources.tokenizer.token_to_id(token).unwrap();
            let count = |ids: &[u32]| ids.iter().filter(|found| **found == id).count();
            assert_eq!(count(&ids), count(&plain), "{name} {token}: {text}");
        }
    }
}

#[tokio::test]
async fn a_model_without_template_says_so() {
    let tokenizer = Tokenizer::from_file(fixture("tokenizers/smollm2/tokenizer.json")).unwrap();
    let pipeline = TextPipeline::new(TextSources::new(tokenizer, 49152), None, 1).unwrap();
    let error = pipeline.render(Arc::default()).await.unwrap_err();
    assert!(error.to_string().contains("no chat template"), "{error}");
}

#[tokio::test]
async fn a_tokenizer_describes_itself_when_its_end_token_is_known() {
    let described = |eos_token: Option<&str>| {
        let tokenizer = Tokenizer::from_file(fixture("tokenizers/smollm2/tokenizer.json")).unwrap();
        let mut sources = TextSources::new(tokenizer, 49152);
        sources.eos_token = eos_token.map(str::to_owned);
        sources.chat_templates = vec![("default".to_owned(), "{{ bos_token }}".to_owned())];
        TextPipeline::new(sources, None, 1).unwrap().info()
    };
    let expected = serde_json::json!({
        "bos_token": null, "eos_token": "<|im_end|>", "chat_template": "{{ bos_token }}",
    });
    assert_eq!(described(Some("<|im_end|>")), Some(expected));
    assert_eq!(described(None), None);
}

/// The runtime has one thread here, which a text that is encoded in place would not let go.
#[tokio::test(flavor = "current_thread")]
async fn a_long_prompt_leaves_the_runtime_free() {
    let pipeline = smollm2();
    let others_ran = tokio::spawn(async {});
    let ids = pipeline.encode("a long prompt, ".repeat(10_000), false).await.unwrap();
    assert!(ids.len() > 30_000);
    assert!(others_ran.is_finished());
}
