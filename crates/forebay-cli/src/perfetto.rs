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

/// What lasted, in nanoseconds, and what it is called.
pub struct Slice {
    pub name: String,
    pub begin_ns: u64,
    pub end_ns: u64,
}

/// A timeline in the making.
#[derive(Default)]
pub struct Timeline {
    tracks: Vec<TrackDescriptor>,
    /// When, and in which order at one moment: ends, what has no length, begins. The file's readers take an end for that of what began
    /// last on its track.
    events: Vec<(u64, Order, TrackEvent)>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Order {
    Ends,
    Moment,
    Begins,
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

    fn event(&mut self, at: (u64, Order), track: Track, kind: i32, name: Option<String>, value: Option<f64>) {
        self.events.push((at.0, at.1, TrackEvent { kind: Some(kind), track: Some(track.0), name, value }));
    }

    /// What lasted from when to when: a track, and as many more of the same name as it takes for none to overlap another.
    pub fn slices(&mut self, name: &str, parent: Option<Track>, slices: impl IntoIterator<Item = Slice>) {
        let mut all: Vec<Slice> = slices.into_iter().collect();
        all.sort_by_key(|s| (s.begin_ns, s.end_ns));
        // Each track, and until when it is taken.
        let mut tracks: Vec<(Track, u64)> = Vec::new();
        for s in all {
            let (begin, end) = (s.begin_ns, s.end_ns.max(s.begin_ns));
            let free = tracks.iter().position(|(_, until)| *until <= begin);
            let i = free.unwrap_or_else(|| {
                tracks.push((self.track(name, parent), 0));
                tracks.len() - 1
            });
            tracks[i].1 = end;
            let (begins, ends) =
                if begin == end { (Order::Moment, Order::Moment) } else { (Order::Begins, Order::Ends) };
            self.event((begin, begins), tracks[i].0, BEGIN, Some(s.name), None);
            self.event((end, ends), tracks[i].0, END, None, None);
        }
    }

    /// A counter's value from `at_ns` on.
    pub fn value(&mut self, track: Track, at_ns: u64, value: f64) {
        self.event((at_ns, Order::Moment), track, COUNTER, None, Some(value));
    }

    /// What a graph did: beneath `parent` a track for each device, beneath that one for each worker that used it (and for who worked
    /// in its place while its function waited for others), and one for its copies. Times are counted from `epoch_ns`.
    pub fn graph(
        &mut self,
        parent: Option<Track>,
        epoch_ns: u64,
        (tasks, devices): (&[String], &[String]),
        (spans, copies): (&[Span], &[CopySpan]),
    ) {
        // A recording may be anybody's.
        let at = |ns: u64| epoch_ns.saturating_add(ns);
        for (d, name) in devices.iter().enumerate() {
            let of_device = self.track(name.clone(), parent);
            let mut workers: Vec<usize> = spans.iter().filter(|s| s.device == d).map(|s| s.worker).collect();
            workers.sort_unstable();
            workers.dedup();
            for w in workers {
                let mine = spans.iter().filter(|s| (s.device, s.worker) == (d, w)).map(|s| Slice {
                    name: tasks.get(s.task as usize).map_or("?", String::as_str).into(),
                    begin_ns: at(s.begin_ns),
                    end_ns: at(s.end_ns),
                });
                self.slices(&format!("worker {w}"), Some(of_device), mine);
            }
            let mine = copies.iter().filter(|c| c.device == d).map(|c| Slice {
                name: format!("{} B {}", c.bytes, if c.to_device { "to the device" } else { "to the host" }),
                begin_ns: at(c.begin_ns),
                end_ns: at(c.end_ns),
            });
            self.slices("copies", Some(of_device), mine);
        }
    }

    /// The file's bytes.
    pub fn encode(mut self) -> Vec<u8> {
        self.events.sort_by_key(|(at, order, _)| (*at, *order));
        let tracks = self.tracks.into_iter().map(|t| Packet { sequence: Some(1), track: Some(t), ..Packet::default() });
        let events = self.events.into_iter().map(|(at, _, e)| Packet {
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
        // One begins when the one before it on its track has ended.
        for t in &tracks {
            let of = events.iter().filter(|e| e.track == t.uuid && e.kind != Some(COUNTER));
            assert!(of.enumerate().all(|(i, e)| e.kind == Some([BEGIN, END][i % 2])), "{:?}", t.name);
        }
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

    #[test]
    fn what_overlaps_is_on_tracks_of_one_name_and_what_has_no_length_is_there() {
        let mut t = Timeline::default();
        let times = [(5, 9), (0, 10), (9, 9), (9, 12), (9, 9), (10, 10), (10, 11), (12, 13), (20, 3)];
        let slice = |(begin_ns, end_ns): (u64, u64)| Slice { name: format!("{begin_ns}-{end_ns}"), begin_ns, end_ns };
        t.slices("w", None, times.map(slice));
        let span = |begin_ns, end_ns| Span { task: 0, device: 0, worker: 0, begin_ns, end_ns };
        // A function that waits, and what is done in its place until after it has gone on.
        let spans = [span(0, 100), span(10, 20), span(30, u64::MAX)];
        t.graph(None, u64::MAX - 1000, (&["a".into()], &["cpu".into()]), (&spans, &[]));
        let got = decode(&t.encode());
        let names: Vec<&str> = got.iter().map(|(n, _)| n.as_str()).collect();
        assert_eq!(names, ["w", "w", "cpu", "worker 0", "worker 0"]);
        assert_eq!(got[0].1, ["0-10", "10-10", "10-11", "12-13", "20-3"]);
        assert_eq!(got[1].1, ["5-9", "9-9", "9-9", "9-12"]);
        assert_eq!((got[3].1.len(), got[4].1.len()), (1, 2));
    }
}
