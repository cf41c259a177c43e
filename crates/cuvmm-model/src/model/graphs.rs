//! Captured work that can be launched repeatedly.

use super::answer::{Answer, INVALID_VALUE, require};
use super::backing::Backing;
use super::state::State;
use super::work::Work;
use cuvmm_driver::{GraphExecHandle, GraphHandle, Ordinal, StreamHandle};

impl<B: Backing> State<B> {
    pub(crate) fn graph_instantiate(
        &mut self,
        device: Ordinal,
        graph: GraphHandle,
    ) -> Answer<GraphExecHandle> {
        self.context(device)?;
        self.refuse_in_capture(None)?;
        let nodes = self.graphs.get(&graph.0).ok_or(INVALID_VALUE)?.clone();
        let handle = self.handles.take();
        self.graph_execs.insert(handle, (device.0, nodes));
        Ok(GraphExecHandle(handle))
    }

    /// Queues a graph's work, which looks up its memory when it runs: it writes to memory that was
    /// remapped at the same addresses since the capture.
    pub(crate) fn graph_launch(
        &mut self,
        device: Ordinal,
        graph: GraphExecHandle,
        stream: StreamHandle,
    ) -> Answer {
        self.context(device)?;
        let (owner, nodes) = self.graph_execs.get(&graph.0).ok_or(INVALID_VALUE)?;
        require(*owner == device.0, INVALID_VALUE)?;
        let work = Work::Graph(nodes.clone());
        self.submit(device, stream, work)?;
        Ok(())
    }

    pub(crate) fn graph_destroy(&mut self, device: Ordinal, graph: GraphHandle) -> Answer {
        self.device(device)?;
        self.graphs.remove(&graph.0).ok_or(INVALID_VALUE)?;
        self.handles.give_back(graph.0);
        self.context(device).map(drop)
    }

    pub(crate) fn graph_exec_destroy(&mut self, device: Ordinal, graph: GraphExecHandle) -> Answer {
        self.device(device)?;
        self.graph_execs.remove(&graph.0).ok_or(INVALID_VALUE)?;
        self.handles.give_back(graph.0);
        self.context(device).map(drop)
    }
}
