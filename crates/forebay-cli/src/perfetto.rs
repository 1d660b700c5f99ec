//! Timelines in Perfetto's format (the few messages of `perfetto_trace.proto` that slices and counters on tracks need).

use forebay::{CopySpan, Span};
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
    #[prost(message, optional, tag = "8")]
    counter: Option<CounterDescriptor>,
}

#[derive(Clone, PartialEq, Message)]
struct CounterDescriptor {
    #[prost(string, optional, tag = "6")]
    unit: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
struct TrackEvent {
    #[prost(int32, optional, tag = "9")]
    kind: Option<i32>,
    #[prost(uint64, optional, tag = "11")]
    track: Option<u64>,
    #[prost(string, optional, tag = "23")]
    name: Option<String>,
    #[prost(double, optional, tag = "44")]
    value: Option<f64>,
}

/// Kinds of events: a slice begins, a slice ends, a counter has a value.
const BEGIN: i32 = 1;
const END: i32 = 2;
const COUNTER: i32 = 4;

/// Name of a track.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Track(u64);

/// A timeline in the making. Slices of one track must not overlap.
#[derive(Default)]
pub struct Timeline {
    tracks: Vec<TrackDescriptor>,
    events: Vec<(u64, TrackEvent)>,
}

impl Timeline {
    /// A track, beneath another one if wanted.
    pub fn track(&mut self, name: impl Into<String>, parent: Option<Track>) -> Track {
        self.add(name.into(), parent, None)
    }

    /// A track of numbers, with their unit.
    pub fn counter(&mut self, name: impl Into<String>, unit: &str, parent: Option<Track>) -> Track {
        self.add(name.into(), parent, Some(CounterDescriptor { unit: Some(unit.into()) }))
    }

    fn add(&mut self, name: String, parent: Option<Track>, counter: Option<CounterDescriptor>) -> Track {
        let uuid = self.tracks.len() as u64 + 1;
        let parent = parent.map(|t| t.0);
        self.tracks.push(TrackDescriptor { uuid: Some(uuid), name: Some(name), parent, counter });
        Track(uuid)
    }

    fn event(&mut self, at_ns: u64, track: Track, kind: i32, name: Option<String>, value: Option<f64>) {
        self.events.push((at_ns, TrackEvent { kind: Some(kind), track: Some(track.0), name, value }));
    }

    /// Something that lasted from `begin_ns` to `end_ns`.
    pub fn slice(&mut self, track: Track, name: impl Into<String>, begin_ns: u64, end_ns: u64) {
        self.event(begin_ns, track, BEGIN, Some(name.into()), None);
        self.event(end_ns, track, END, None, None);
    }

    /// A counter's value from `at_ns` on.
    pub fn value(&mut self, track: Track, at_ns: u64, value: f64) {
        self.event(at_ns, track, COUNTER, None, Some(value));
    }

    /// What a graph did: beneath `parent` a track for each device, beneath that one for each worker that used it, and one
    /// for its copies. Times are counted from `epoch_ns`.
    pub fn graph(
        &mut self,
        parent: Option<Track>,
        epoch_ns: u64,
        (tasks, devices): (&[String], &[String]),
        (spans, copies): (&[Span], &[CopySpan]),
    ) {
        for (d, name) in devices.iter().enumerate() {
            let of_device = self.track(name.clone(), parent);
            let mut workers: Vec<usize> = spans.iter().filter(|s| s.device == d).map(|s| s.worker).collect();
            workers.sort_unstable();
            workers.dedup();
            for w in workers {
                let track = self.track(format!("worker {w}"), Some(of_device));
                for s in spans.iter().filter(|s| (s.device, s.worker) == (d, w)) {
                    let name = tasks.get(s.task as usize).map_or("?", String::as_str);
                    self.slice(track, name, epoch_ns + s.begin_ns, epoch_ns + s.end_ns);
                }
            }
            let mine: Vec<&CopySpan> = copies.iter().filter(|c| c.device == d).collect();
            if !mine.is_empty() {
                let track = self.track("copies", Some(of_device));
                for c in mine {
                    let name = format!("{} B {}", c.bytes, if c.to_device { "to the device" } else { "to the host" });
                    self.slice(track, name, epoch_ns + c.begin_ns, epoch_ns + c.end_ns);
                }
            }
        }
    }

    /// The file's bytes.
    pub fn encode(mut self) -> Vec<u8> {
        // At equal times ends come before begins.
        self.events.sort_by_key(|(at, e)| (*at, e.kind != Some(END)));
        let tracks = self.tracks.into_iter().map(|t| Packet { sequence: Some(1), track: Some(t), ..Packet::default() });
        let events = self.events.into_iter().map(|(at, e)| Packet {
            timestamp: Some(at),
            sequence: Some(1),
            event: Some(e),
            track: None,
        });
        Trace { packet: tracks.chain(events).collect() }.encode_to_vec()
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Names of the tracks of a file, and for each the names of its slices (or the values of its counter).
    pub fn decode(bytes: &[u8]) -> Vec<(String, Vec<String>)> {
        let trace = Trace::decode(bytes).unwrap();
        assert!(trace.packet.iter().filter_map(|p| p.timestamp).is_sorted());
        let tracks: Vec<&TrackDescriptor> = trace.packet.iter().filter_map(|p| p.track.as_ref()).collect();
        let events: Vec<&TrackEvent> = trace.packet.iter().filter_map(|p| p.event.as_ref()).collect();
        let count = |kind| events.iter().filter(|e| e.kind == Some(kind)).count();
        assert_eq!(count(BEGIN), count(END));
        assert!(events.iter().all(|e| tracks.iter().any(|t| t.uuid == e.track)));
        let of = |t: &TrackDescriptor| -> Vec<String> {
            let mine = events.iter().filter(|e| e.track == t.uuid);
            mine.filter_map(|e| e.name.clone().or(e.value.map(|v| v.to_string()))).collect()
        };
        tracks.into_iter().map(|t| (t.name.clone().unwrap(), of(t))).collect()
    }

    #[test]
    fn every_span_and_copy_is_a_slice_on_the_track_of_its_worker_or_device() {
        let spans: Vec<Span> = (0..10)
            .map(|i| Span {
                task: i % 2,
                device: i as usize % 2,
                worker: 0,
                begin_ns: 10 * u64::from(i),
                end_ns: 10 * u64::from(i) + 5,
            })
            .collect();
        let copies = [CopySpan { device: 1, to_device: true, bytes: 8, begin_ns: 0, end_ns: 3 }];
        let mut t = Timeline::default();
        t.graph(None, 1000, (&["a".into(), "b".into()], &["cpu".into(), "gpu".into()]), (&spans, &copies));
        let load = t.counter("load", "%", None);
        t.value(load, 1, 40.0);
        let got = decode(&t.encode());
        let names: Vec<&str> = got.iter().map(|(n, _)| n.as_str()).collect();
        assert_eq!(names, ["cpu", "worker 0", "gpu", "worker 0", "copies", "load"]);
        assert_eq!(got[1].1, ["a"; 5]);
        assert_eq!((got[4].1[0].as_str(), got[5].1[0].as_str()), ("8 B to the device", "40"));
    }
}
