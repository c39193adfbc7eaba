//! The OpenAPI document (3.1) and a page that shows it, `GET /openapi.json` and `/docs`.

use std::sync::LazyLock;

use axum::{
    Json, Router,
    body::Body,
    extract::{Path, Request, State},
    http::{Method, StatusCode},
    response::{Html, Response},
};
use schemars::{SchemaGenerator, generate::SchemaSettings};
use serde_json::{Map, Value, json};
use swagger_ui_dist::{ApiDefinition, OpenApiSource, generate_routes};
use tower::ServiceExt;

use super::{
    App,
    fields::field::object_schema,
    refusal::{Dialect, Refusal},
    routes::{self, Operation},
};

/// It is the same for every server of this version but for the model's name, and made once.
static DOCUMENT: LazyLock<Value> = LazyLock::new(|| {
    let operations: Vec<Operation> =
        routes::table().into_iter().map(|(operation, _)| operation).collect();
    describe(&operations)
});

/// `GET /openapi.json`.
pub async fn document(State(app): State<App>) -> Json<Value> {
    let mut document = DOCUMENT.clone();
    let name = app.generator.model().name;
    let schemas = document["paths"].as_object_mut().into_iter().flat_map(Map::values_mut);
    for path in schemas {
        let body = "/post/requestBody/content/application~1json/schema/properties/model";
        if let Some(model) = path.pointer_mut(body) {
            model["enum"] = json!([name, "", "tgi", "dummy", null]);
        }
    }
    Json(document)
}

/// `GET /docs`: Swagger UI, from this server alone.
pub async fn page() -> Html<&'static str> {
    Html(
        r##"<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Trireme</title>
<link rel="stylesheet" href="/docs/swagger-ui.css">
</head>
<body>
<div id="page"></div>
<script src="/docs/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "/openapi.json", dom_id: "#page"})</script>
</body>
</html>
"##,
    )
}

/// What the page is made of.
const ASSETS: &[&str] = &["swagger-ui.css", "swagger-ui-bundle.js"];

/// `GET /docs/{file}`.
pub async fn asset(Path(file): Path<String>) -> Result<Response, Refusal> {
    static FILES: LazyLock<Router> = LazyLock::new(|| {
        let api_definition = OpenApiSource::Uri("/openapi.json");
        generate_routes(ApiDefinition { uri_prefix: "/docs", api_definition, title: None })
    });
    let path = format!("/docs/{file}");
    if !ASSETS.contains(&file.as_str()) {
        return Err(Refusal::no_route("GET", &path));
    }
    // The package's own page writes the request's address into its text; only files leave it.
    let request = Request::builder().method(Method::GET).uri(path).body(Body::empty());
    let request = request.map_err(|_| Refusal::panicked())?;
    let answer = FILES.clone().oneshot(request).await;
    Ok(answer.unwrap_or_else(|never| match never {}))
}

fn describe(operations: &[Operation]) -> Value {
    let settings = SchemaSettings::draft2020_12().for_serialize().with(|settings| {
        settings.definitions_path = "/components/schemas".into();
        settings.meta_schema = None;
    });
    let mut generator = settings.into_generator();
    let mut paths = Map::new();
    for operation in operations {
        let path = operation.path.replace("{*", "{");
        let methods = paths.entry(path).or_insert_with(|| json!({}));
        methods[operation.method.as_str().to_lowercase()] = entry(operation, &mut generator);
    }
    let mut schemas = generator.take_definitions(true);
    schemas.insert("OpenAiError".into(), openai_error());
    schemas.insert("TgiError".into(), tgi_error());
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Trireme",
            "description": "Large language models over OpenAI's and text-generation-inference's APIs.",
            "version": env!("CARGO_PKG_VERSION"),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        // The key where the server has one, or nothing.
        "security": [{"key": []}, {}],
    })
}

fn entry(operation: &Operation, generator: &mut SchemaGenerator) -> Value {
    let error = match operation.dialect() {
        Dialect::OpenAi => json!({"$ref": "#/components/schemas/OpenAiError"}),
        Dialect::Tgi => json!({"$ref": "#/components/schemas/TgiError"}),
    };
    let mut content = Map::new();
    if let Some(schema) = operation.answer {
        content.insert("application/json".into(), json!({"schema": schema(generator)}));
    }
    if let Some(schema) = operation.event {
        // As OpenAPI 3.2 has it: an event is an object, and its data a string that holds JSON.
        let json = json!({
            "contentMediaType": "application/json",
            "contentSchema": {"anyOf": [schema(generator), error]},
        });
        let forms = match operation.dialect() {
            Dialect::OpenAi => json!([json, {"const": "[DONE]"}]),
            Dialect::Tgi => json!([json]),
        };
        let data = json!({"type": "string", "anyOf": forms});
        let event = json!({"type": "object", "properties": {"data": data}, "required": ["data"]});
        content.insert("text/event-stream".into(), json!({"schema": event}));
    }
    if content.is_empty() {
        content.insert("text/plain".into(), json!({"schema": {"type": "string"}}));
    }
    let refused = |what: &str| json!({"description": what, "content": {"application/json": {"schema": error}}});
    let mut entry = json!({
        "summary": operation.summary,
        "responses": {
            "200": {"description": "Done.", "content": content},
            "4XX": refused("Refused: the request."),
            "5XX": refused("Failed, or not ready."),
        },
    });
    if !operation.fields.is_empty() {
        let schema = object_schema(&operation.fields);
        entry["requestBody"] =
            json!({"required": true, "content": {"application/json": {"schema": schema}}});
    }
    if operation.path.contains("{*id}") {
        entry["parameters"] = json!([
            {"name": "id", "in": "path", "required": true, "schema": {"type": "string"}},
        ]);
    }
    // A probe says in its own words why the server is not ready.
    if matches!(operation.path, "/ready" | "/health") {
        let status = StatusCode::SERVICE_UNAVAILABLE.as_str();
        entry["responses"][status] = entry["responses"]["200"].clone();
        entry["responses"][status]["description"] = "Not ready.".into();
    }
    entry
}

fn openai_error() -> Value {
    let error = json!({
        "type": "object",
        "properties": {
            "message": {"type": "string"},
            "type": {"type": "string"},
            "param": {"type": ["string", "null"]},
            "code": {"type": "string"},
        },
        "required": ["message", "type", "param", "code"],
    });
    json!({"type": "object", "properties": {"error": error}, "required": ["error"]})
}

fn tgi_error() -> Value {
    json!({
        "type": "object",
        "properties": {"error": {"type": "string"}, "error_type": {"type": "string"}},
        "required": ["error", "error_type"],
    })
}
