from mlx_snapkv.cli.app import main

main()
