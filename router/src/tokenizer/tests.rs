use std::{fs, path::PathBuf};

use serde_json::Value;
use tokenizers::Tokenizer;

use super::*;

fn fixture(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../integration-tests/fixtures").join(path)
}

fn json(path: &str) -> Value {
    serde_json::from_slice(&fs::read(fixture(path)).unwrap()).unwrap()
}

fn ids_of(value: &Value) -> Option<Vec<u32>> {
    Some(value.as_array()?.iter().map(|id| id.as_u64().unwrap() as u32).collect())
}

fn smollm2() -> TextPipeline {
    let tokenizer = Tokenizer::from_file(fixture("tokenizers/smollm2/tokenizer.json")).unwrap();
    let template = json("smollm2/chat.json")["chat_template"].as_str().map(str::to_owned);
    TextPipeline::new(TextSources::new(tokenizer, 49152), template, 2).unwrap()
}

#[tokio::test]
async fn conversations_become_the_reference_ids() {
    let pipeline = smollm2();
    let golden = json("smollm2/chat.json");
    let mut spelled = 0;
    for case in golden["conversations"].as_array().unwrap() {
        let conversation = Conversation {
            messages: case["messages"].as_array().unwrap().clone(),
            add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
            ..Conversation::default()
        };
        let rendered = pipeline.render(conversation).await.unwrap();
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
    let golden = json("tokenizers/smollm2/cases.json");
    for case in golden["cases"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let ids = pipeline.encode(text.to_owned(), false).await.unwrap();
        assert_eq!(Some(ids.clone()), ids_of(&case["ids"]), "{}", case["name"]);
        if let Some(decoded) = case["decoded"].as_str() {
            assert_eq!(pipeline.decode(ids).await.unwrap(), decoded, "{}", case["name"]);
        }
    }
}

#[tokio::test]
async fn a_model_without_template_says_so() {
    let tokenizer = Tokenizer::from_file(fixture("tokenizers/smollm2/tokenizer.json")).unwrap();
    let pipeline = TextPipeline::new(TextSources::new(tokenizer, 49152), None, 1).unwrap();
    let error = pipeline.render(Conversation::default()).await.unwrap_err();
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
