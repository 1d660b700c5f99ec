//! Random graphs against a reference interpreter: same outputs, no deadlock, bounded memory.

use std::time::Duration;

use forebay::{Datablock, Graph, Mode, Predicate, Runtime, Task, Template};
use proptest::prelude::*;

fn word() -> Template {
    Template::scalar::<u64>()
}

/// A task of a random graph: its inputs are outputs of earlier tasks (or feeds), its output is a mix of them.
#[derive(Clone, Debug)]
struct Node {
    inputs: Vec<usize>,
    in_place: bool,
    capacity: usize,
}

fn nodes() -> impl Strategy<Value = Vec<Node>> {
    let node = (proptest::collection::vec(any::<prop::sample::Index>(), 0..5), any::<bool>(), 1usize..4);
    proptest::collection::vec(node, 1..14).prop_map(|raw| {
        raw.into_iter()
            .enumerate()
            .map(|(i, (inputs, in_place, capacity))| Node {
                inputs: inputs.into_iter().filter(|_| i > 0).map(|ix| ix.index(i)).collect(),
                in_place,
                capacity,
            })
            .collect()
    })
}

fn mix(node: usize, values: &[u64]) -> u64 {
    values.iter().fold(node as u64 + 1, |h, v| (h ^ v).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(17))
}

/// The reference: every node in order, for one round of inputs. Node without inputs: the feed's value.
fn reference(nodes: &[Node], fed: &[u64]) -> Vec<u64> {
    let mut out: Vec<u64> = Vec::new();
    let mut feed = fed.iter();
    for (i, n) in nodes.iter().enumerate() {
        let values: Vec<u64> = match n.inputs.is_empty() {
            true => vec![*feed.next().unwrap()],
            false => n.inputs.iter().map(|&j| out[j]).collect(),
        };
        out.push(mix(i, &values));
    }
    out
}

fn check(nodes: &[Node], rounds: u64, mode: Mode, workers: usize) {
    let mut g = Graph::new("random");
    let mut ids = Vec::new();
    let mut feeds = Vec::new();
    for (i, n) in nodes.iter().enumerate() {
        let mut t = Task::new(format!("n{i}"));
        let k = n.inputs.len().max(1);
        for p in 0..k {
            t = t.input(&format!("i{p}"), word());
        }
        t = if n.in_place { t.in_place("i0", "o") } else { t.output("o", word()) };
        let in_place = n.in_place;
        let id = g
            .add(t.host(move |inv| {
                let first = if in_place { None } else { Some(inv.value::<u64>(0)?) };
                let rest = (1..k).map(|p| inv.value::<u64>(p)).collect::<Result<Vec<_>, _>>()?;
                let o = &mut inv.output::<u64>("o")?[0];
                let mut values = vec![first.unwrap_or(*o)];
                values.extend(rest);
                *o = mix(i, &values);
                Ok(())
            }))
            .unwrap();
        if n.inputs.is_empty() {
            feeds.push(g.feed((id, "i0"), n.capacity).unwrap());
        }
        for (p, &j) in n.inputs.iter().enumerate() {
            let from: forebay::TaskId = ids[j];
            g.connect_with((from, "o"), (id, &format!("i{p}")), n.capacity, Predicate::Always).unwrap();
        }
        ids.push(id);
    }
    let drains: Vec<_> = ids.iter().map(|id| g.drain((*id, "o"), 2).unwrap()).collect();
    g.check().unwrap();
    let rt = Runtime::builder().cpu_only().mode(mode).workers(workers).build().unwrap();
    let run = rt.start(g).unwrap();
    let value = |round: u64, f: usize| round.wrapping_mul(1_000_003) ^ f as u64;
    std::thread::scope(|s| {
        s.spawn(|| {
            for round in 0..rounds {
                for (f, feed) in feeds.iter().enumerate() {
                    let block = Datablock::scalar(value(round, f)).unwrap();
                    run.push_timeout(*feed, block, Duration::from_secs(30)).unwrap();
                }
            }
        });
        for round in 0..rounds {
            let fed: Vec<u64> = (0..feeds.len()).map(|f| value(round, f)).collect();
            let want = reference(nodes, &fed);
            for (i, d) in drains.iter().enumerate() {
                let got = run.pull_timeout(*d, Duration::from_secs(30)).unwrap_or_else(|e| panic!("{e}"));
                assert_eq!(got.as_slice::<u64>().unwrap(), [want[i]], "node {i} in round {round}");
            }
        }
    });
    // Bounded memory: nothing is left anywhere, and no channel ever held more than its capacity.
    let snapshot = run.snapshot();
    assert!(snapshot.channels.iter().all(|c| c.len == 0));
    assert!(snapshot.tasks.iter().all(|t| t.invocations == rounds));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
    #[test]
    fn outputs_are_those_of_the_reference(nodes in nodes(), mode in 0usize..4, workers in 1usize..4) {
        check(&nodes, 25, Mode::ALL[mode], workers);
    }
}
