//! The project's own tasks, run as `cargo xtask <task>`.

mod abi;
mod candle;
mod cargo;
mod house;
mod instructions;
mod pack;
mod release;
mod windows;

use clap::Parser;

/// The project's own tasks.
#[derive(Debug, Parser)]
#[command(name = "xtask", bin_name = "cargo xtask")]
enum Task {
    Abi(abi::Abi),
    Candle(candle::Candle),
    House(house::House),
    Instructions(instructions::Instructions),
    Pack(pack::Pack),
    Release(release::Release),
    Windows(windows::Windows),
}

fn main() -> anyhow::Result<()> {
    match Task::parse() {
        Task::Abi(abi) => abi.run(),
        Task::Candle(candle) => candle.run(),
        Task::House(house) => house.run(),
        Task::Instructions(instructions) => instructions.run(),
        Task::Pack(pack) => pack.run(),
        Task::Release(release) => release.run(),
        Task::Windows(windows) => windows.run(),
    }
}
