//! The search as a CUDA graph that repeats itself on the device: a program of its own (`benches/peers/graph_while.cu`).

use std::process::Command;

use super::search::Csr;
use crate::bench::peers::{Peer, build_cuda};

/// The program, if it could be built.
pub(super) struct GraphWhile(Option<Peer>);

impl GraphWhile {
    /// Builds it behind the text of the experiments, whose kernels it shares.
    pub(super) fn new(text: &str) -> Self {
        let built = build_cuda("graph_while.cu", text, "native");
        GraphWhile(built.inspect_err(|why| eprintln!("resident: no CUDA graph that repeats itself: {why}")).ok())
    }

    /// The median of some searches of the graph from vertex 0, in milliseconds; none without the program, or where it does
    /// not run.
    ///
    /// # Errors
    /// That it did not find what is `expected`.
    pub(super) fn search(&self, graph: &Csr, expected: &[u32], repeats: usize) -> Result<Option<f64>, String> {
        let Some(program) = &self.0 else { return Ok(None) };
        let [from, to] = ["in", "out"].map(|n| program.path().with_extension(n));
        let mut words = vec![expected.len() as u32, graph.edges.len() as u32];
        words.extend(graph.offsets.iter().chain(&graph.edges));
        std::fs::write(&from, bytemuck::cast_slice::<u32, u8>(&words)).map_err(|e| e.to_string())?;
        let out = Command::new(program.path()).args([&from, &to]).arg(repeats.to_string()).output();
        let out = out.map_err(|e| e.to_string())?;
        let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        if !out.status.success() {
            // An older driver, say: what else is measured stands.
            eprintln!("resident: the CUDA graph that repeats itself: {}: {}", out.status, said(&out.stderr));
            return Ok(None);
        }
        let found = std::fs::read(&to).map_err(|e| e.to_string())?;
        let right = found.chunks_exact(4).map(|b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]));
        if found.len() != expected.len() * 4 || !right.eq(expected.iter().copied()) {
            return Err("the CUDA graph that repeats itself found other distances".into());
        }
        let ms = said(&out.stdout);
        ms.parse().map(Some).map_err(|_| format!("the CUDA graph that repeats itself said {ms:?}"))
    }
}
