//! Dashboard and alerts ask for figures that exist, by their right names and labels; and everything is scraped.

use std::collections::{BTreeMap, BTreeSet};

use s3csi_driver::metrics::{ALL, Description};
use serde_json::{Value, json};

use crate::chart::{elements, render, text};

/// Labels that a scrape adds, and that of histograms.
const ADDED_LABELS: [&str; 6] = ["le", "node", "pod", "namespace", "instance", "job"];

/// A figure in a query, and the labels that are asked of it.
#[derive(Debug, PartialEq, Eq)]
struct RecordedRequest {
    series: String,
    labels: BTreeSet<String>,
}

/// The figures in a query: names that begin as ours do, with the braces behind them; and all labels that are grouped by.
fn asked(query: &str) -> (Vec<RecordedRequest>, BTreeSet<String>) {
    let is_part = |it: char| it.is_ascii_alphanumeric() || it == '_';
    let mut found = Vec::new();
    for (start, _) in query.match_indices("s3csi_") {
        let rest = &query[start..];
        let end = rest.find(|it| !is_part(it)).unwrap_or(rest.len());
        let braces = rest[end..].strip_prefix('{').and_then(|it| it.split_once('}'));
        let labels = braces.map(|(inside, _)| inside.split(',')).into_iter().flatten();
        let labels = labels.map(|it| it.chars().take_while(|it| is_part(*it)).collect()).collect();
        found.push(RecordedRequest { series: rest[..end].to_owned(), labels });
    }
    let groups = query.split("by (").skip(1).filter_map(|it| it.split_once(')'));
    let groups = groups.flat_map(|(inside, _)| inside.split(',')).map(|it| it.trim().to_owned()).collect();
    (found, groups)
}

#[track_caller]
fn check(query: &str) -> usize {
    let series: BTreeMap<String, &Description> =
        ALL.iter().flat_map(|it| it.series().into_iter().map(move |series| (series, *it))).collect();
    let (found, groups) = asked(query);
    let is_label = |of: &Description, it: &str| of.labels.contains(&it) || ADDED_LABELS.contains(&it);
    let mut descriptions = Vec::new();
    for RecordedRequest { series: name, labels } in &found {
        let description = series.get(name).unwrap_or_else(|| panic!("{name} is no figure of ours: {query}"));
        for label in labels {
            assert!(is_label(description, label), "{name} has no label {label}: {query}");
        }
        descriptions.push(*description);
    }
    for label in groups {
        assert!(descriptions.iter().any(|it| is_label(it, &label)), "no figure has the label {label}: {query}");
    }
    // A counter, or part of a histogram, means something only over time.
    for RecordedRequest { series: name, .. } in &found {
        let is_over_time = ["_total", "_bucket", "_sum", "_count"].iter().any(|it| name.ends_with(it));
        assert_eq!(query.contains("rate(") || query.contains("increase("), is_over_time, "{query}");
    }
    found.len()
}

/// Every text behind a key, however deep.
fn texts<'a>(value: &'a Value, key: &str) -> Vec<&'a str> {
    match value {
        Value::Object(members) => {
            let own = members.get(key).and_then(Value::as_str);
            own.into_iter().chain(members.values().flat_map(|it| texts(it, key))).collect()
        }
        Value::Array(members) => members.iter().flat_map(|it| texts(it, key)).collect(),
        _ => Vec::new(),
    }
}

#[test]
fn queries_are_understood() {
    let (found, groups) = asked(r#"sum by (node, le) (rate(s3csi_a_bucket{x="1",y=~"2|3"}[5m])) / s3csi_b"#);
    let labels = |all: &[&str]| all.iter().map(ToString::to_string).collect::<BTreeSet<_>>();
    assert_eq!(
        found,
        [
            RecordedRequest { series: "s3csi_a_bucket".to_owned(), labels: labels(&["x", "y"]) },
            RecordedRequest { series: "s3csi_b".to_owned(), labels: labels(&[]) },
        ]
    );
    assert_eq!(groups, labels(&["le", "node"]));
}

#[test]
fn the_dashboard_asks_for_what_exists_and_shows_all_of_it() {
    let objects = render(&[("metrics.dashboard.enabled", json!(true))]);
    let map = objects.get("ConfigMap", "s3-csi-dashboard");
    assert_eq!(map["metadata"]["labels"]["grafana_dashboard"], "1");
    let dashboard: Value = serde_json::from_str(text(&map["data"]["s3csi.json"])).unwrap();
    let queries = texts(&dashboard["panels"], "expr");
    assert!(queries.len() > 20, "{queries:?}");
    for query in &queries {
        assert!(check(query) > 0, "no figure of ours: {query}");
    }
    for description in ALL {
        let is_shown = queries.iter().any(|it| it.contains(&description.family()));
        assert!(is_shown, "{} is on no panel", description.family());
    }
    let numbers: BTreeSet<u64> = elements(&dashboard["panels"]).map(|it| it["id"].as_u64().unwrap()).collect();
    assert_eq!(numbers.len(), elements(&dashboard["panels"]).count(), "panels share a number");
}

#[test]
fn alerts_ask_for_what_exists_and_say_what_to_do() {
    let objects = render(&[("metrics.prometheusRule.enabled", json!(true))]);
    let rules: Vec<&Value> = elements(&objects.get("PrometheusRule", "s3-csi")["spec"]["groups"])
        .flat_map(|it| elements(&it["rules"]))
        .collect();
    assert!(rules.len() > 5, "{rules:?}");
    for rule in rules {
        assert!(check(text(&rule["expr"])) > 0, "{rule}");
        for part in ["summary", "description"] {
            assert!(text(&rule["annotations"][part]).len() > 10, "{rule}");
        }
        // Helm must leave the templates of Prometheus alone.
        for label in text(&rule["annotations"]["summary"]).split("$labels.").skip(1) {
            let label: String = label.chars().take_while(char::is_ascii_alphanumeric).collect();
            assert!(text(&rule["expr"]).contains(&label), "{rule} does not know {label}");
        }
    }
}

#[test]
fn prometheus_scrapes_every_program_where_it_serves() {
    for (strategy, programs) in [("pod", vec!["s3-csi-controller", "s3-csi-node"]), ("systemd", vec!["s3-csi-node"])] {
        let objects = render(&[("strategy", json!(strategy)), ("metrics.serviceMonitor.enabled", json!(true))]);
        let mut monitors: Vec<&str> =
            objects.of_kind("ServiceMonitor").map(|it| text(&it["metadata"]["name"])).collect();
        monitors.sort_unstable();
        assert_eq!(monitors, programs, "{strategy}");
        for name in programs {
            let service = objects.get("Service", &format!("{name}-metrics"));
            let workload = objects.workloads().find(|it| it["metadata"]["name"] == name).unwrap();
            assert_eq!(service["spec"]["selector"], workload["spec"]["selector"]["matchLabels"]);
            let port = &service["spec"]["ports"][0];
            let served = &workload["spec"]["template"]["spec"]["containers"][0]["ports"][0];
            assert_eq!((&port["targetPort"], &port["port"]), (&served["name"], &served["containerPort"]));
            let monitor = &objects.get("ServiceMonitor", name)["spec"];
            assert_eq!(monitor["endpoints"][0]["port"], port["name"]);
            for (label, value) in monitor["selector"]["matchLabels"].as_object().unwrap() {
                assert_eq!(&service["metadata"]["labels"][label], value);
            }
        }
    }
}
