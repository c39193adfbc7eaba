//! Spans reach a collector over a real socket, under the caller's trace and with the resource of
//! the process; what is dropped by the filter does not.

use std::{collections::BTreeMap, time::Duration};

use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::any_value::Value,
};
use tokio::sync::mpsc;
use tonic::{Request, Response, Status, metadata::MetadataMap};
use tracing::Instrument;
use trireme_telemetry::{LogFormat, Service};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const CALLER: &str = "b7ad6b7169203331";

struct Collector(mpsc::Sender<ExportTraceServiceRequest>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let _ = self.0.send(request.into_inner()).await;
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spans_reach_the_collector_under_the_callers_trace() {
    let incoming =
        tonic::transport::server::TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let endpoint = format!("http://{}", incoming.local_addr().unwrap());
    let (sender, mut exported) = mpsc::channel(8);
    let serving = tokio::spawn(
        tonic::transport::Server::builder()
            .add_service(TraceServiceServer::new(Collector(sender)))
            .serve_with_incoming(incoming),
    );

    let service = Service { name: "trireme-shard", rank: Some(3), instance: "here".into() };
    let guard = trireme_telemetry::install(service, LogFormat::Json, Some(&endpoint)).unwrap();

    let mut caller = MetadataMap::new();
    let traceparent = format!("00-{TRACE}-{CALLER}-01");
    caller.insert("traceparent", traceparent.parse().unwrap());
    let span = tracing::info_span!("step", step_id = 7);
    trireme_telemetry::set_parent(&span, trireme_telemetry::extract(&caller));
    let outgoing = async {
        tracing::debug_span!("detail").in_scope(|| {});
        tracing::info_span!(target: "h2::codec", "transport").in_scope(|| {});
        let mut metadata = MetadataMap::new();
        trireme_telemetry::inject(&mut metadata);
        metadata
    }
    .instrument(span.clone())
    .await;
    drop(span);
    guard.flush(Duration::from_secs(20));

    let request = exported.try_recv().expect("the flush exported");
    assert!(exported.try_recv().is_err(), "one batch, no loop");
    assert_eq!(request.resource_spans.len(), 1);
    let resource = request.resource_spans[0].resource.as_ref().unwrap();
    let attributes: BTreeMap<_, _> = resource
        .attributes
        .iter()
        .map(|pair| (pair.key.as_str(), pair.value.clone().unwrap().value.unwrap()))
        .collect();
    let text = |value: &str| Value::StringValue(value.into());
    assert_eq!(attributes["service.name"], text("trireme-shard"));
    assert_eq!(attributes["service.instance.id"], text("here"));
    assert_eq!(attributes["trireme.rank"], Value::IntValue(3));

    let spans = &request.resource_spans[0].scope_spans[0].spans;
    let names: Vec<_> = spans.iter().map(|span| span.name.as_str()).collect();
    assert_eq!(names, ["step"]);
    assert_eq!(hex(&spans[0].trace_id), TRACE);
    assert_eq!(hex(&spans[0].parent_span_id), CALLER);
    let expected = format!("00-{TRACE}-{}-01", hex(&spans[0].span_id));
    assert_eq!(outgoing.get("traceparent").unwrap().to_str().unwrap(), expected);
    serving.abort();
}
