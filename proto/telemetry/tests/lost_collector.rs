//! A collector that is not there, or never answers, neither fails the start nor outlives the
//! deadline of the flush.

use std::time::Duration;

use trireme_telemetry::LogFormat;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_collector_costs_no_more_than_the_deadline() {
    for (endpoint, named) in [
        ("localhost:4317", "http://host:port"),
        ("https://localhost:4317", "http://host:port"),
        ("http://", "http://"),
    ] {
        let error = trireme_telemetry::install("test", LogFormat::Text, Some(endpoint))
            .err()
            .expect(endpoint);
        assert!(format!("{error:#}").contains(named), "{error:#}");
    }

    // Bound and never accepted from: the connection opens and nothing is ever answered.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", silent.local_addr().unwrap());
    let guard = trireme_telemetry::install("test", LogFormat::Text, Some(&endpoint)).unwrap();
    tracing::info_span!("lost").in_scope(|| tracing::info!("still served"));
    let (done, ended) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        guard.flush(Duration::from_millis(100));
        let _ = done.send(());
    });
    // Far below the exporter's own timeout, far above the deadline.
    tokio::time::timeout(Duration::from_secs(4), ended)
        .await
        .expect("the flush ends by its own deadline")
        .unwrap();
}
