module saf.example/warehouse

go 1.24

require github.com/lib/pq v1.12.3
