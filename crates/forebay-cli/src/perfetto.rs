//! Timelines in Perfetto's format (the few messages of `perfetto_trace.proto` that slices on tracks need).

use forebay::Span;
use prost::Message;

#[derive(Clone, PartialEq, Message)]
struct Trace {
    #[prost(message, repeated, tag = "1")]
    packet: Vec<Packet>,
}

#[derive(Clone, PartialEq, Message)]
struct Packet {
    #[prost(uint64, optional, tag = "8")]
    timestamp: Option<u64>,
    #[prost(uint32, optional, tag = "10")]
    sequence: Option<u32>,
    #[prost(message, optional, tag = "11")]
    event: Option<TrackEvent>,
    #[prost(message, optional, tag = "60")]
    track: Option<TrackDescriptor>,
}

#[derive(Clone, PartialEq, Message)]
struct TrackDescriptor {
    #[prost(uint64, optional, tag = "1")]
    uuid: Option<u64>,
    #[prost(string, optional, tag = "2")]
    name: Option<String>,
    #[prost(uint64, optional, tag = "5")]
    parent: Option<u64>,
}

#[derive(Clone, PartialEq, Message)]
struct TrackEvent {
    /// 1 begins a slice, 2 ends it.
    #[prost(int32, optional, tag = "9")]
    kind: Option<i32>,
    #[prost(uint64, optional, tag = "11")]
    track: Option<u64>,
    #[prost(string, optional, tag = "23")]
    name: Option<String>,
}

/// Spans of one graph as a trace: a track for each device, and beneath it one for each worker that used it.
pub fn timeline(tasks: &[String], devices: &[String], spans: &[Span]) -> Vec<u8> {
    let device_track = |d: usize| 1 + d as u64;
    let worker_track = |d: usize, w: usize| 1000 * (1 + d as u64) + w as u64;
    let track = |uuid, name: String, parent| Packet {
        sequence: Some(1),
        track: Some(TrackDescriptor { uuid: Some(uuid), name: Some(name), parent }),
        ..Packet::default()
    };
    let mut packet: Vec<Packet> =
        devices.iter().enumerate().map(|(d, n)| track(device_track(d), n.clone(), None)).collect();
    let mut workers: Vec<(usize, usize)> = spans.iter().map(|s| (s.device, s.worker)).collect();
    workers.sort_unstable();
    workers.dedup();
    packet.extend(
        workers.into_iter().map(|(d, w)| track(worker_track(d, w), format!("worker {w}"), Some(device_track(d)))),
    );
    let mut events: Vec<(u64, i32, u64, Option<String>)> = Vec::with_capacity(2 * spans.len());
    for s in spans {
        let name = tasks.get(s.task as usize).cloned();
        events.push((s.begin_ns, 1, worker_track(s.device, s.worker), name));
        events.push((s.end_ns, 2, worker_track(s.device, s.worker), None));
    }
    // At equal times ends come before begins.
    events.sort_by_key(|e| (e.0, -e.1));
    packet.extend(events.into_iter().map(|(t, kind, track, name)| Packet {
        timestamp: Some(t),
        sequence: Some(1),
        event: Some(TrackEvent { kind: Some(kind), track: Some(track), name }),
        track: None,
    }));
    Trace { packet }.encode_to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_span_becomes_a_begin_and_an_end_on_a_known_track() {
        let spans: Vec<Span> = (0..10)
            .map(|i| Span {
                task: i % 2,
                device: i as usize % 2,
                worker: 0,
                begin_ns: 10 * u64::from(i),
                end_ns: 10 * u64::from(i) + 5,
            })
            .collect();
        let bytes = timeline(&["a".into(), "b".into()], &["cpu".into(), "gpu".into()], &spans);
        let trace = Trace::decode(&bytes[..]).unwrap();
        let tracks: Vec<u64> = trace.packet.iter().filter_map(|p| p.track.as_ref()?.uuid).collect();
        let events: Vec<&TrackEvent> = trace.packet.iter().filter_map(|p| p.event.as_ref()).collect();
        assert_eq!(events.iter().filter(|e| e.kind == Some(1)).count(), 10);
        assert_eq!(events.iter().filter(|e| e.kind == Some(2)).count(), 10);
        assert!(events.iter().all(|e| tracks.contains(&e.track.unwrap())));
        assert!(trace.packet.iter().filter_map(|p| p.timestamp).is_sorted());
    }
}
