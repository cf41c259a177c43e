//! The project's own chores, run as `cargo xtask <chore>`.

mod abi;
mod candle;
mod cargo;
mod house;
mod instructions;
mod pack;

use clap::Parser;

/// The project's own chores.
#[derive(Debug, Parser)]
#[command(name = "xtask", bin_name = "cargo xtask")]
enum Chore {
    Abi(abi::Abi),
    Candle(candle::Candle),
    House(house::House),
    Instructions(instructions::Instructions),
    Pack(pack::Pack),
}

fn main() -> anyhow::Result<()> {
    match Chore::parse() {
        Chore::Abi(abi) => abi.run(),
        Chore::Candle(candle) => candle.run(),
        Chore::House(house) => house.run(),
        Chore::Instructions(instructions) => instructions.run(),
        Chore::Pack(pack) => pack.run(),
    }
}
